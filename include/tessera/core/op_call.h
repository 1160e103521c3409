#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/argument.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The properties of a tensor that a sharding rule can read.
struct TensorMeta {
  std::vector<std::int64_t> sizes;  ///< global sizes of the tensor
  std::int64_t itemsize = 4;        ///< number of bytes of an element

  int ndim() const { return static_cast<int>(sizes.size()); }
  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t numel() const;
};

/// A call of an operator on distributed tensors, for the operator's sharding rule. The arguments
/// are in the order of the schema, include keyword-only arguments and `out`, and have default
/// values where the caller gave none. A tensor that is passed twice is in `tensors` twice.
///
/// The parameter `arg` of a member function is the index of an argument. The member functions treat
/// an argument after the last one as None, and throw Error for an argument of another kind.
struct OpCall {
  std::string_view op;  ///< name with overload: "aten::add.Tensor"; no overload: "aten::mm"
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  bool has_tensor(std::size_t arg) const;  ///< whether the argument is a tensor, and not None
  /// The index of a tensor argument in `tensors`.
  int tensor_index(std::size_t arg) const;
  const TensorMeta& tensor(std::size_t arg) const;
  /// The tensors of a list argument. A single tensor is a list of one tensor, and None is an empty
  /// list.
  std::vector<TensorRef> tensor_list(std::size_t arg) const;

  bool is_none(std::size_t arg) const;
  /// Value of an argument that is an integer or a bool.
  std::int64_t integer(std::size_t arg) const;
  /// The value of an integer argument, or `otherwise` if the argument is None.
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  /// The value of a bool argument, or `otherwise` if the argument is None.
  bool boolean_or(std::size_t arg, bool otherwise) const;
  const DType& dtype(std::size_t arg) const;
  /// Value of an argument that is an integer, a bool or a double.
  double number(std::size_t arg) const;
  /// The values of an argument that is a list of integers. A single integer is a list of one
  /// integer, and None is an empty list.
  std::vector<std::int64_t> integers(std::size_t arg) const;
};

}  // namespace tessera
TESSERA_API_END

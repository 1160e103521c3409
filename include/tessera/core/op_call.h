#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// What a rule sees of a tensor: its global sizes.
struct TensorMeta {
  std::vector<std::int64_t> sizes;
  std::int64_t itemsize = 4;

  int ndim() const { return static_cast<int>(sizes.size()); }
  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t numel() const;
};

/// An argument that is a tensor: its index in OpCall::tensors; -1 for a None in a list.
struct TensorRef {
  int index = -1;
  friend bool operator==(const TensorRef&, const TensorRef&) = default;
};

/// An argument of an operator, free of libtorch's types. monostate is None, or an argument that no
/// rule reads (a generator). Scalar types are integers with libtorch's numbering.
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

/// A call of an operator on distributed tensors, as its rule sees it: the arguments in schema order
/// (keyword-only ones and `out` included, defaults filled in), every tensor once per use.
///
/// The accessors treat an argument that is absent (past the end) as None and throw Error where the
/// argument is of another kind than asked for.
struct OpCall {
  std::string_view op;  ///< name with overload: "aten::add.Tensor"; no overload: "aten::mm"
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  bool has_tensor(std::size_t arg) const;  ///< present, a tensor and not None
  int tensor_index(std::size_t arg) const;
  const TensorMeta& tensor(std::size_t arg) const;
  /// The tensors of a list argument (one of a single tensor; none of None).
  std::vector<TensorRef> tensor_list(std::size_t arg) const;

  bool is_none(std::size_t arg) const;
  std::int64_t integer(std::size_t arg) const;  ///< an integer or a bool
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  bool boolean_or(std::size_t arg, bool otherwise) const;
  double number(std::size_t arg) const;                       ///< an integer, a bool or a double
  std::vector<std::int64_t> integers(std::size_t arg) const;  ///< one for an integer, none for None
};

}  // namespace tessera

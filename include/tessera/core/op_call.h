#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The properties of a tensor that a sharding rule sees.
struct TensorMeta {
  std::vector<std::int64_t> sizes;  ///< global sizes
  std::int64_t itemsize = 4;        ///< bytes of an element

  int ndim() const { return static_cast<int>(sizes.size()); }
  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t numel() const;
};

/// A tensor argument: its index in OpCall::tensors, or -1 for a None in a list.
struct TensorRef {
  int index = -1;
  friend bool operator==(const TensorRef&, const TensorRef&) = default;
};

/// The properties of an element type in a call (the target type of a cast) that a rule sees.
struct DType {
  enum class Kind : std::uint8_t {
    kBool,
    kUnsigned,
    kSigned,
    kFloating,
    kComplex,
    kOther,  ///< quantised, packed or 8-bit floating-point elements
  };
  Kind kind = Kind::kOther;
  std::int64_t itemsize = 1;  ///< bytes of one element
  /// The caller's own number of the type. No rule reads it; a local call passes it back unchanged.
  std::int64_t id = 0;
  friend bool operator==(const DType&, const DType&) = default;
};

/// An operator's argument without libtorch's types. monostate is None, or an argument that no rule
/// reads (a generator).
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string, DType,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

/// A call of an operator on distributed tensors, as its rule sees it: the arguments in the order of
/// the schema, including keyword-only arguments and `out`, with defaults filled in. A tensor that
/// is passed twice is in `tensors` twice.
///
/// The accessors treat an argument past the end as None. They throw Error for an argument of
/// another kind.
struct OpCall {
  std::string_view op;  ///< name with overload: "aten::add.Tensor"; no overload: "aten::mm"
  std::vector<Argument> args;
  std::vector<TensorMeta> tensors;

  bool has_tensor(std::size_t arg) const;  ///< whether it is a tensor and not None
  int tensor_index(std::size_t arg) const;
  const TensorMeta& tensor(std::size_t arg) const;
  /// The tensors of a list argument. A single tensor counts as a list of one, None as an empty
  /// list.
  std::vector<TensorRef> tensor_list(std::size_t arg) const;

  bool is_none(std::size_t arg) const;
  std::int64_t integer(std::size_t arg) const;  ///< of an integer or a bool
  std::int64_t integer_or(std::size_t arg, std::int64_t otherwise) const;
  bool boolean_or(std::size_t arg, bool otherwise) const;
  const DType& dtype(std::size_t arg) const;
  double number(std::size_t arg) const;  ///< of an integer, a bool or a double
  /// one value for an integer, none for None
  std::vector<std::int64_t> integers(std::size_t arg) const;
};

}  // namespace tessera
TESSERA_API_END

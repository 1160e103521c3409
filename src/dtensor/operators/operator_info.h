// OperatorInfo: the properties of an operator. BoundCall: a call in the form that rules read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/complex.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "random/fills.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// A property of an operator that neither the schema nor the sharding rule of the operator shows.
enum class Trait : std::uint8_t {
  kRandomInplace,  ///< the operator fills a tensor; each number is drawn by global index
  kNativeDropout,  ///< the operator is native_dropout; its mask is drawn by global index
  kForeach,        ///< a _foreach_ operator, which runs as one call for each list index
  kOwnKernel,      ///< the operator has its own kernel in src/dtensor/overrides/ and no call plan
  kHelperTensors,  ///< the composite operator makes plain helper tensors (composite_kernels.cpp)
  kViewsMemory,    ///< the argument storage_offset is an offset in the input's memory
  kUnsafeView,     ///< the operator's result can be a copy instead of a view
  kLeavesMemory,   ///< the operator returns uninitialised memory
  kReadsOneValue,  ///< the operator returns one value to the host; a StrictScope permits this
  // Traits of operators with a number argument that must not be applied to terms of a Partial sum:
  kNumberBesideSum,  ///< the number is not a factor of the sum (the fill value of masked_fill)
  kDivides,          ///< the operator divides by the number argument, which may be zero
  kFailsByElement,   ///< the operator throws on ranks that have an invalid index or value
};

/// The traits of one operator, from the table in operator_info.cpp.
class OperatorTraits {
 public:
  /// `name`: the operator's full name, such as "aten::add.Tensor". The constructor looks the name
  /// up in the table in operator_info.cpp.
  explicit OperatorTraits(std::string_view name);

  bool has(Trait trait) const { return (traits_ >> static_cast<unsigned>(trait) & 1U) != 0; }

  /// Returns the function that fills a tensor; nullptr for operators without kRandomInplace.
  RandomFill fill() const { return fill_; }

 private:
  std::uint32_t traits_ = 0;
  RandomFill fill_ = nullptr;
};

/// A trait and the operators that have it: one row of the table in operator_info.cpp.
struct TraitRow {
  Trait trait;
  /// Operator names without "aten::", separated by blanks. "mul_.Tensor" is one overload; "mul_.*"
  /// is every overload of mul_; "_foreach_*" is every operator with this prefix.
  std::string_view names;
};
std::span<const TraitRow> trait_rows();

std::vector<std::string> names_in(std::string_view text);
/// Whether the operator `name` (without "aten::") matches `pattern`, which is one of the names in a
/// row of the table.
bool covers(std::string_view pattern, std::string_view name);

/// The properties of an operator that dispatch needs: its schema (read once), its traits and its
/// sharding rule.
struct OperatorInfo {
  enum class ArgumentKind : std::uint8_t {
    kTensor,              ///< an argument of type `Tensor` or `Tensor?`
    kTensorList,          ///< an argument of type `Tensor[]`
    kOptionalTensorList,  ///< an argument of type `Tensor?[]`
    kScalar,      ///< a number that no sharding rule reads; only its type is in the cache key
    kDType,       ///< an argument of type `ScalarType` or `ScalarType?`
    kGenerator,   ///< a random generator; the cache key contains only whether a generator is passed
    kNumberList,  ///< a list of numbers; only their types are in the cache key
    kStatic,      ///< an argument of any other type; its value is in the cache key
  };
  struct Return {
    bool is_tensor = false;  ///< whether the result is a tensor or a list of tensors
    int written = -1;        ///< index of the argument that is returned (in-place, out=), or -1
  };

  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name;  ///< full name: "aten::add.Tensor"; "aten::mm" if there is no overload
  std::vector<ArgumentKind> arguments;
  std::vector<Return> returns;
  std::vector<int> written;  ///< indices of the arguments that the operator writes to
  int viewed = -1;           ///< index of the argument that the results are views of, or -1
  // indices of the arguments `device` and `generator`; -1 if the operator has no such argument
  int device = -1;
  int generator = -1;
  int stride = -1;  ///< index of the argument `stride` that follows `size`, or -1
  /// index of the argument `storage_offset` for Trait::kViewsMemory; otherwise -1
  int storage_offset = -1;
  bool takes_tensors = false;
  /// Whether the operator is composed of other operators. True for CompositeImplicitAutograd, and
  /// for foreach operators, which are loops.
  bool decomposes = false;
  /// Whether the operator changes the shape of an argument in place (t_, squeeze_).
  bool changes_shape = false;
  bool draws_random = false;
  bool is_own = false;  ///< whether the operator is defined by another library than libtorch

  OperatorTraits traits;
  RuleFunction rule;

  bool is_list(std::size_t argument) const {
    return arguments[argument] == ArgumentKind::kTensorList ||
           arguments[argument] == ArgumentKind::kOptionalTensorList;
  }
  bool is_written(std::size_t argument) const;
};

/// Returns the OperatorInfo of `op`, valid until the process ends.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

/// Returns the operator `name`, such as "aten::add.Tensor". Throws c10::Error if there is none.
c10::OperatorHandle find_operator(std::string_view name);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The category of a number that no sharding rule reads; a part of cache keys. Zero, infinity and
/// NaN are separate, because such numbers must not scale a Partial sum.
enum class NumberType : std::uint8_t {
  kInteger = 1,
  kDouble,
  kBool,
  kNone,
  kOther,
  kZeroInteger,
  kZero,
  kNotFinite,
  kNotFiniteOther
};
inline NumberType number_type(bool) {
  return NumberType::kBool;
}
inline NumberType number_type(std::int64_t value) {
  return value == 0 ? NumberType::kZeroInteger : NumberType::kInteger;
}
inline NumberType number_type(double value) {
  return !std::isfinite(value) ? NumberType::kNotFinite
         : value == 0          ? NumberType::kZero
                               : NumberType::kDouble;
}
inline NumberType number_type(const c10::complex<double>& value) {
  const bool finite = std::isfinite(value.real()) && std::isfinite(value.imag());
  return finite ? NumberType::kOther : NumberType::kNotFiniteOther;
}
NumberType number_type(const c10::IValue& value);
/// The NumberType of a wrapped number, as in at::mul(x, 2.0); kNone for other plain tensors.
NumberType number_type(const at::Tensor& tensor);

/// An operator call in the form that sharding rules read. `tensors`: the defined tensors, to which
/// the arguments in `call` refer by index; an undefined tensor is None.
struct BoundCall {
  OpCall call;
  std::vector<at::Tensor> tensors;
};

/// Makes the BoundCall of a call. `arguments`: the values of all arguments in the schema. Slow,
/// because references and sizes are copied.
BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments);

/// Converts `argument`, in the form that sharding rules use, to a libtorch value of `type`. If
/// `argument` is the index of a tensor, returns this tensor from `tensors`.
c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors);

}  // namespace tessera::detail

// An operator call in the form that its sharding rule reads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/complex.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "operators/operator_info.h"

namespace tessera::detail {

/// What a call's cache key contains of a number that no rule reads: its type, and whether the terms
/// of a sum may be multiplied or divided by it one by one.
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
// Zero and non-finite numbers are separate classes of numbers (see rule_of_call).
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
/// The type of a wrapped number; kNone for any other plain tensor.
NumberType number_type(const at::Tensor& tensor);

/// A call in the form that its sharding rule reads, and the tensors of the call. Undefined tensors
/// are None.
struct BoundCall {
  OpCall call;
  std::vector<at::Tensor> tensors;
};

/// `arguments`: one value for each argument of the schema. Copies the references and sizes of all
/// tensors, so calls with plans of kinds kDirect and kLocal do not use it.
BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments);

/// A rule's argument as a libtorch value of `type`. A reference to a tensor is looked up in
/// `tensors`.
c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors);

}  // namespace tessera::detail

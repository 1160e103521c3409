// A call as its sharding rule sees it.
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

/// The part of a number that counts in a call's key if no rule reads it: its type, and whether a
/// sum may be multiplied or divided by it term by term.
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
// Zero and numbers that are not finite count as separate types (see rule_of_call).
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
/// The type of a plain tensor; if it is not a wrapped number: kNone.
NumberType number_type(const at::Tensor& tensor);

/// A call as its rule sees it, and the tensors that it names. Undefined tensors are None.
struct BoundCall {
  OpCall call;
  std::vector<at::Tensor> tensors;
};

/// `arguments`: one value for each argument of the schema. Copies the references and sizes of all
/// tensors, so kDirect and kLocal run without it.
BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments);

/// Back from a rule's argument to what a parameter of `type` takes; tensors are looked up in
/// `tensors`.
c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors);

}  // namespace tessera::detail

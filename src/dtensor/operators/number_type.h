#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/complex.h>

#include <cmath>
#include <cstdint>

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

}  // namespace tessera::detail

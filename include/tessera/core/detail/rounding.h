#pragma once

#include <concepts>
#include <type_traits>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// a / b, rounded up; a >= 0, b > 0.
template <std::integral T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

/// The smallest multiple of `unit` that is not less than `value`; value >= 0, unit > 0.
template <std::integral T>
constexpr T round_up(T value, std::type_identity_t<T> unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace tessera::detail
TESSERA_API_END

#pragma once

#include <concepts>
#include <type_traits>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Returns a / b, rounded up. Requires a >= 0 and b > 0.
template <std::integral T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

/// Returns the smallest multiple of `unit` that is not less than `value` >= 0. Requires unit > 0.
template <std::integral T>
constexpr T round_up(T value, std::type_identity_t<T> unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace tessera::detail
TESSERA_API_END

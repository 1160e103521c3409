#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "tessera/kernels/detail/philox.h"

namespace tessera::kernels {

/// `value` as a T, as if rounded once, to nearest even. For types narrower than float, rounds to a
/// float first, to odd: the second rounding then gives the result of a single one (Boldo and
/// Melquiond 2008).
template <class T>
TESSERA_HOST_DEVICE inline T narrow(double value) {
  return static_cast<T>(value);
}

/// The float next to `value` in either direction whose last bit is 1, if `value` is no float.
TESSERA_HOST_DEVICE inline float round_to_odd(double value) {
  auto rounded = static_cast<float>(value);
  const auto back = static_cast<double>(rounded);
  if (back == value || back != back) {
    return rounded;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof bits);
  const bool away = value < 0.0 ? back < value : back > value;
  bits = (away ? bits - 1 : bits) | 1U;
  std::memcpy(&rounded, &bits, sizeof bits);
  return rounded;
}

template <>
TESSERA_HOST_DEVICE inline c10::BFloat16 narrow<c10::BFloat16>(double value) {
  return static_cast<c10::BFloat16>(round_to_odd(value));
}

template <>
TESSERA_HOST_DEVICE inline c10::Half narrow<c10::Half>(double value) {
  return static_cast<c10::Half>(round_to_odd(value));
}

}  // namespace tessera::kernels

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "tessera/kernels/philox.h"

namespace tessera::kernels {

/// `value` as a T, rounded once, to nearest even. By way of a float, for types narrower than it,
/// that is rounded to odd: then the second rounding cannot err (Boldo and Melquiond 2008).
template <class T>
TESSERA_HOST_DEVICE inline T narrow(double value) {
  return static_cast<T>(value);
}

TESSERA_HOST_DEVICE inline float round_to_odd(double value) {
  auto rounded = static_cast<float>(value);
  const auto back = static_cast<double>(rounded);
  if (back == value || back != back) return rounded;
  std::uint32_t bits;
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

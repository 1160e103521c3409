#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::rules {

/// Numbers of c10::ScalarType that arguments hold.
enum ScalarType : std::int64_t {
  kChar = 1,
  kLong = 4,
  kHalf = 5,
  kDouble = 7,
  kComplexDouble = 10,
  kBool = 11,
  kBFloat16 = 15
};

/// Floating or complex.
constexpr bool is_floating(std::int64_t type) {
  return (type >= kHalf && type <= kComplexDouble) || type == kBFloat16;
}

/// Bytes of an element; of the types after bfloat16 (quantised, float8) not known here: 1.
constexpr std::int64_t itemsize_of(std::int64_t type) {
  constexpr std::array<std::int64_t, 11> kSizes{1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16};
  if (type == kBFloat16) return 2;
  return type >= 0 && type <= kComplexDouble ? kSizes[static_cast<std::size_t>(type)] : 1;
}

}  // namespace tessera::rules

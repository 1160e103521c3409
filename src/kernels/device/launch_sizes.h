// Helpers for launches: select a kernel by a call's types and addresses.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

constexpr int kThreads = 256;  // number of threads in a block

/// Calls body.operator()<T>() with T for the element type `type`.
template <class Body>
void with_type(Element type, Body&& body) {
  switch (type) {
    case Element::kFloat:
      return body.template operator()<float>();
    case Element::kBFloat16:
      return body.template operator()<c10::BFloat16>();
    case Element::kHalf:
      return body.template operator()<c10::Half>();
  }
}

/// Calls body.operator()<T, N>() with the element type and the number of elements per access: 16
/// bytes, or one element if addresses are not aligned.
template <class Body>
void with_vectors(Element type, bool aligned, Body&& body) {
  with_type(type, [&]<class T>() {
    if (aligned) {
      body.template operator()<T, kVectorBytes / sizeof(T)>();
    } else {
      body.template operator()<T, 1>();
    }
  });
}

inline std::int64_t bytes_of(Element type) {
  return type == Element::kFloat ? 4 : 2;
}

/// Whether each of the `rows` rows, which are `stride` elements apart, begins at a multiple of 16
/// bytes.
inline bool is_aligned(const void* data, std::int64_t rows, std::int64_t stride, Element type) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0 &&
         (rows <= 1 || stride * bytes_of(type) % kVectorBytes == 0);
}

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace tessera::kernels

// What the kernels for GPUs are made of: rows of elements, taken 16 bytes at a time. Their bodies
// are plain functions of a thread's number, which the tests compile for the host.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tessera/kernels/detail/philox.h"

namespace tessera::kernels {

/// The types that the kernels take. They compute in fp32 and round once.
enum class Element { kFloat, kBFloat16, kHalf };

constexpr int kVectorBytes = 16;  // the widest access of a thread

template <int N>
struct Floats {
  float at[N];
};

/// What one access moves.
struct __attribute__((may_alias, aligned(kVectorBytes))) Vector {
  std::uint32_t words[4];
};

/// N elements: the n that `from` has, then zeros. A whole row of N is read by 16 bytes, and aligned
/// for that, unless N is 1.
template <int N, class T>
TESSERA_HOST_DEVICE inline Floats<N> load(const T* from, std::int64_t n) {
  T elements[N];
  if (N > 1 && n >= N) {
    constexpr int kVectors = N * sizeof(T) / kVectorBytes;
    for (int i = 0; i < kVectors; ++i) {
      const Vector vector = reinterpret_cast<const Vector*>(from)[i];
      std::memcpy(reinterpret_cast<char*>(elements) + i * kVectorBytes, &vector, kVectorBytes);
    }
  } else {
    for (int i = 0; i < N; ++i) {
      elements[i] = i < n ? from[i] : T(0.0F);
    }
  }
  Floats<N> values;
  for (int i = 0; i < N; ++i) {
    values.at[i] = static_cast<float>(elements[i]);
  }
  return values;
}

/// Writes the first n of N values, as load reads them.
template <int N, class T>
TESSERA_HOST_DEVICE inline void store(T* to, const Floats<N>& values, std::int64_t n) {
  T elements[N];
  for (int i = 0; i < N; ++i) {
    elements[i] = static_cast<T>(values.at[i]);
  }
  if (N > 1 && n >= N) {
    constexpr int kVectors = N * sizeof(T) / kVectorBytes;
    for (int i = 0; i < kVectors; ++i) {
      Vector vector;
      std::memcpy(&vector, reinterpret_cast<const char*>(elements) + i * kVectorBytes,
                  kVectorBytes);
      reinterpret_cast<Vector*>(to)[i] = vector;
    }
  } else {
    for (int i = 0; i < N; ++i) {
      if (i < n) {
        to[i] = elements[i];
      }
    }
  }
}

/// What load() finds where store() has written `values`.
template <class T, int N>
TESSERA_HOST_DEVICE inline Floats<N> rounded(Floats<N> values) {
  for (int i = 0; i < N; ++i) {
    values.at[i] = static_cast<float>(static_cast<T>(values.at[i]));
  }
  return values;
}

/// Within 2 ulp.
TESSERA_HOST_DEVICE inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

}  // namespace tessera::kernels

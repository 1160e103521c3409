// Building blocks of the GPU kernels, for rows accessed in units of 16 bytes. Kernel bodies take a
// thread index as an argument, so that tests can compile the bodies for a CPU.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tessera/kernels/detail/philox.h"

namespace tessera::kernels {

/// The element types that the kernels support. Kernels compute in fp32 and round once.
enum class Element { kFloat, kBFloat16, kHalf };

constexpr int kVectorBytes = 16;

template <int N>
struct Floats {
  float at[N];
};

template <int kBytes>
struct __attribute__((may_alias, aligned(kBytes))) Words {
  std::uint32_t words[kBytes / 4];
};
using Vector = Words<kVectorBytes>;

/// The memory accesses for N elements of type T: accesses of 16 bytes, or a single smaller access.
template <class T, int N>
struct Access {
  static constexpr int kBytes = std::clamp<int>(N * sizeof(T), 4, kVectorBytes);
  // Number of accesses of kBytes; 0 for one element of 2 bytes, which is accessed as an element.
  static constexpr int kCount = N * sizeof(T) / kBytes;
  using Words = kernels::Words<kBytes>;
};

/// Writes `value` by one memory access, even where nvcc would make several accesses.
template <int kBytes>
TESSERA_HOST_DEVICE inline void write_global(const Words<kBytes>& value, Words<kBytes>* to) {
#ifdef __CUDA_ARCH__
  const std::uint32_t* const w = value.words;
  const std::size_t address = __cvta_generic_to_global(to);
  if constexpr (kBytes == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(w[0]), "r"(w[1])
                 : "memory");
  } else {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(w[0]) : "memory");
  }
#else
  *to = value;
#endif
}

/// Returns N elements: the first n come from address `from`, the others are zeros. If N > 1, `from`
/// must be aligned for accesses of 16 bytes.
template <int N, class T>
TESSERA_HOST_DEVICE inline Floats<N> load(const T* from, std::int64_t n) {
  T elements[N];
  if (N > 1 && n >= N) {
    using A = Access<T, N>;
    for (int i = 0; i < A::kCount; ++i) {
      const auto words = reinterpret_cast<const typename A::Words*>(from)[i];
      std::memcpy(reinterpret_cast<char*>(elements) + i * A::kBytes, &words, A::kBytes);
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

/// Writes the first n of N values. If n >= N, calls write(words, address) for each memory access of
/// Access<T, N>; otherwise writes the values one by one.
template <int N, class T, class Write>
TESSERA_HOST_DEVICE inline void store_by(T* to, const Floats<N>& values, std::int64_t n,
                                         const Write& write) {
  T elements[N];
  for (int i = 0; i < N; ++i) {
    elements[i] = static_cast<T>(values.at[i]);
  }
  if (N > 1 && n >= N) {
    using A = Access<T, N>;
    for (int i = 0; i < A::kCount; ++i) {
      typename A::Words words;
      std::memcpy(&words, reinterpret_cast<const char*>(elements) + i * A::kBytes, A::kBytes);
      write(words, reinterpret_cast<typename A::Words*>(to) + i);
    }
  } else {
    for (int i = 0; i < N; ++i) {
      if (i < n) {
        to[i] = elements[i];
      }
    }
  }
}

/// Stores the first n of N values to global memory.
template <int N, class T>
TESSERA_HOST_DEVICE inline void store(T* to, const Floats<N>& values, std::int64_t n) {
  store_by(to, values, n, [](const auto& words, auto* at) { write_global(words, at); });
}

/// Stores the first n of N values to any memory, including a block's shared memory.
template <int N, class T>
TESSERA_HOST_DEVICE inline void store_anywhere(T* to, const Floats<N>& values, std::int64_t n) {
  store_by(to, values, n, [](const auto& words, auto* at) { *at = words; });
}

template <class T, int N>
TESSERA_HOST_DEVICE inline Floats<N> rounded(Floats<N> values) {
  for (int i = 0; i < N; ++i) {
    values.at[i] = static_cast<float>(static_cast<T>(values.at[i]));
  }
  return values;
}

/// Like for_vectors(), for the vectors that begin at elements i, i + apart, i + 2 * apart, ...
template <int N, int kAtOnce, class Load, class Use>
TESSERA_HOST_DEVICE inline void for_vectors_from(std::int64_t i, std::int64_t apart,
                                                 std::int64_t size, const Load& load,
                                                 const Use& use) {
  for (; i + (kAtOnce - 1) * apart + N <= size; i += kAtOnce * apart) {
    decltype(load(i, size)) loaded[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) {
      loaded[k] = load(i + k * apart, N);
    }
    for (int k = 0; k < kAtOnce; ++k) {
      use(i + k * apart, N, loaded[k]);
    }
  }
  if constexpr (kAtOnce > 1) {
    for_vectors_from<N, kAtOnce / 2>(i, apart, size, load, use);
  } else if (i < size) {
    use(i, size - i, load(i, size - i));
  }
}

/// Calls use(i, n, load(i, n)) for this thread's vectors of a row: N elements from index i, of
/// which n are in the row. Loads `kAtOnce` vectors at once to overlap latencies.
template <int N, int kAtOnce, class Team, class Load, class Use>
TESSERA_HOST_DEVICE inline void for_vectors(std::int64_t size, const Team& team, const Load& load,
                                            const Use& use) {
  for_vectors_from<N, kAtOnce>(team.first() * N, team.width() * N, size, load, use);
}

/// Calls body.operator()<T>() with the C++ type T of the element type `type`.
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

/// Calls body.operator()<T, N>() with the C++ type T of the elements. If `aligned`, N is the number
/// of elements in 16 bytes, otherwise 1.
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

/// Whether every row begins at a multiple of 16 bytes. `stride`: number of elements from the
/// beginning of a row to the beginning of the next row.
inline bool is_aligned(const void* data, std::int64_t rows, std::int64_t stride, Element type) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0 &&
         (rows <= 1 || stride * bytes_of(type) % kVectorBytes == 0);
}

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Returns a / b, with an error of at most 2 ulp.
TESSERA_HOST_DEVICE inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

}  // namespace tessera::kernels

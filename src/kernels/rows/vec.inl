// Sixteen floats at once, by the vector extension of GCC and Clang: the compiler maps it to the
// registers that TESSERA_ISA has. Operations work on each float separately and without fused
// multiply-add, so every instruction set gives the same bits. Included inside namespace
// tessera::kernels::TESSERA_ISA.

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
using Halves = Bf16 __attribute__((vector_size(32)));

#define TESSERA_INLINE static inline __attribute__((always_inline))

TESSERA_INLINE Floats broadcast(float x) {
  return Floats{} + x;
}

TESSERA_INLINE Floats as_floats(Words bits) {
  return reinterpret_cast<Floats>(bits);
}

TESSERA_INLINE Floats load(const float* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

TESSERA_INLINE Floats load(const Bf16* from) {
  Halves v;
  __builtin_memcpy(&v, from, sizeof v);
  return as_floats(__builtin_convertvector(v, Words) << 16);
}

/// Loads the first n of sixteen elements from memory; the others are zero.
template <class T>
TESSERA_INLINE Floats load(const T* from, std::int64_t n) {
  if (n >= kLanes) {
    return load(from);
  }
  T lanes[kLanes] = {};
  __builtin_memcpy(lanes, from, static_cast<std::size_t>(n) * sizeof(T));
  return load(lanes);
}

TESSERA_INLINE void store(float* to, Floats v) {
  __builtin_memcpy(to, &v, sizeof v);
}

TESSERA_INLINE void store(Bf16* to, Floats v) {
  const auto bits = reinterpret_cast<Words>(v);
  const Words nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Words rounded = v != v ? Words{} + 0x7FC0 : nearest_even;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}

template <class T>
TESSERA_INLINE void store(T* to, Floats v, std::int64_t n) {
  if (n >= kLanes) {
    return store(to, v);
  }
  T lanes[kLanes];
  store(lanes, v);
  __builtin_memcpy(to, lanes, static_cast<std::size_t>(n) * sizeof(T));
}

/// The values that load() would read after store(): rounded to T.
template <class T>
TESSERA_INLINE Floats rounded(Floats v) {
  T lanes[kLanes];
  store(lanes, v);
  return load(lanes);
}

/// The sum of all sixteen elements, added as a binary tree.
TESSERA_INLINE float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  return lanes[0];
}

/// exp(x) within 2 ulp. x is clamped to [-87, 88]. x = n ln2 + r, with the polynomial of Moshier's
/// Cephes in r.
TESSERA_INLINE Floats exp(Floats x) {
  x = x < -87.0F ? broadcast(-87.0F) : x;
  x = x > 88.0F ? broadcast(88.0F) : x;
  // 1.5 * 2^23; adding and subtracting this number rounds to an integer.
  const float round = 12582912.0F;
  const Floats n = (x * 1.44269504088896341F + round) - round;
  const Floats r = (x - n * 0.693359375F) - n * -2.12194440e-4F;
  Floats p = broadcast(1.9875691500e-4F);
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const Floats y = p * (r * r) + r + 1.0F;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * reinterpret_cast<Floats>(power);
}

/// exp(x), but 0 for x below -87, where exp() would clamp x.
TESSERA_INLINE Floats exp_or_0(Floats x) {
  return x < -87.0F ? Floats{} : exp(x);
}

/// A mask with all bits set in the first n of sixteen elements.
TESSERA_INLINE Ints lanes_below(std::int64_t n) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<std::int32_t>(n < kLanes ? n : kLanes);
}

/// The maximum of n elements, ignoring NaN; -inf if there are none.
template <class T>
TESSERA_INLINE float largest(const T* x, std::int64_t n) {
  const Floats none = broadcast(-__builtin_inff());
  Floats top = none;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats v = lanes_below(n - i) ? load(x + i, n - i) : none;
    top = v > top ? v : top;
  }
  float lanes[kLanes];
  store(lanes, top);
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) {
    most = lanes[i] > most ? lanes[i] : most;
  }
  return most;
}

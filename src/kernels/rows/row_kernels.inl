// The row kernels for one instruction set: defines tessera::kernels::TESSERA_ISA::kTable. Includes
// no header with inline functions: the linker could keep a copy with instructions that older
// machines lack.
#include <cstdint>

#include "rows/row_kernels.h"

namespace tessera::kernels::TESSERA_ISA {

// A vector of sixteen floats (vector extension of GCC and Clang). Without fused multiply-add, every
// instruction set gives the same bits.

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

template <class T>
TESSERA_INLINE Floats rounded(Floats v) {
  T lanes[kLanes];
  store(lanes, v);
  return load(lanes);
}

/// Returns the sum of all sixteen floats of a vector, added in pairs as in a binary tree.
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

/// Returns exp(x) within 2 ulp; x is first clamped to [-87, 88]. Computes x = n ln2 + r, and exp(r)
/// with the polynomial of Cephes (Moshier).
TESSERA_INLINE Floats exp(Floats x) {
  x = x < -87.0F ? broadcast(-87.0F) : x;
  x = x > 88.0F ? broadcast(88.0F) : x;
  // 1.5 * 2^23: adding and then subtracting the number rounds a float to an integer
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

/// Returns exp(x), or 0 for x < -87.
TESSERA_INLINE Floats exp_or_0(Floats x) {
  return x < -87.0F ? Floats{} : exp(x);
}

TESSERA_INLINE Ints lanes_below(std::int64_t n) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<std::int32_t>(n < kLanes ? n : kLanes);
}

/// Returns the maximum of n elements, ignoring NaN; -inf if n is 0.
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

/// Returns 1 / rms of a row whose squares overflow in fp32. Multiplies elements by kShrink before
/// squaring, as on CUDA. eps is too small to matter here.
template <class T>
__attribute__((noinline)) float rstd_of_huge_row(const T* v, std::int64_t dim) {
  Floats squares{};
  for (std::int64_t i = 0; i < dim; i += kLanes) {
    const Floats each = load(v + i, dim - i) * kShrink;
    squares += each * each;
  }
  return kShrink / __builtin_sqrtf(sum(squares) / static_cast<float>(dim));
}

template <class T>
void rms_norm(const T* x, const T* residual, const float* weight, T* sums, T* out, float* rstd,
              std::int64_t rows, std::int64_t dim, float eps) {
  const T* v_row = residual != nullptr ? sums : x;
  for (std::int64_t row = 0; row < rows; ++row, v_row += dim, out += dim) {
    for (std::int64_t i = row * dim; residual != nullptr && i < (row + 1) * dim; i += kLanes) {
      const std::int64_t n = (row + 1) * dim - i;
      store(sums + i, load(x + i, n) + load(residual + i, n), n);
    }
    Floats squares{};
    for (std::int64_t i = 0; i < dim; i += kLanes) {
      const Floats v = load(v_row + i, dim - i);
      squares += v * v;
    }
    const float total = sum(squares);
    const float scale = total == __builtin_inff()
                            ? rstd_of_huge_row(v_row, dim)
                            : 1.0F / __builtin_sqrtf(total / static_cast<float>(dim) + eps);
    rstd[row] = scale;
    for (std::int64_t i = 0; i < dim; i += kLanes) {
      Floats v = load(v_row + i, dim - i) * scale;
      if (weight != nullptr) {
        v *= load(weight + i, dim - i);
      }
      store(out + i, v, dim - i);
    }
  }
}

template <bool kHuge, class T>
TESSERA_INLINE Floats load_scaled(const T* x, std::int64_t n, float scale) {
  const Floats v = load(x, n);
  return kHuge ? v * scale : v;
}

/// Computes the gradient of one row of RMSNorm. If kHuge, multiplies x by `scale` first, as on
/// CUDA, so that no product with the gradient overflows.
template <bool kHuge, class T>
void rms_norm_backward_row(const T* grad, const T* sum_grad, const T* x, const float* weight,
                           float scale, T* x_grad, float* weight_grad, std::int64_t dim) {
  const float later = kHuge ? 1.0F : scale;
  Floats dots{};
  for (std::int64_t i = 0; i < dim; i += kLanes) {
    const Floats gx = load(grad + i, dim - i) * load_scaled<kHuge>(x + i, dim - i, scale);
    dots += weight != nullptr ? gx * load(weight + i, dim - i) : gx;
    if (weight_grad != nullptr) {
      store(weight_grad + i, load(weight_grad + i, dim - i) + gx * later, dim - i);
    }
  }
  const float pull = sum(dots) * later * later / static_cast<float>(dim);
  for (std::int64_t i = 0; i < dim; i += kLanes) {
    Floats g = load(grad + i, dim - i);
    if (weight != nullptr) {
      g *= load(weight + i, dim - i);
    }
    Floats of_x = (g - load_scaled<kHuge>(x + i, dim - i, scale) * pull) * scale;
    if (sum_grad != nullptr) {
      of_x = rounded<T>(of_x) + load(sum_grad + i, dim - i);
    }
    store(x_grad + i, of_x, dim - i);
  }
}

template <class T>
void rms_norm_backward(const T* grad, const T* sum_grad, const T* x, const float* weight,
                       const float* rstd, T* x_grad, float* weight_grad, std::int64_t rows,
                       std::int64_t dim) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t at = row * dim;
    const auto run =
        rstd[row] < kHugeRstd ? &rms_norm_backward_row<true, T> : &rms_norm_backward_row<false, T>;
    run(grad + at, sum_grad != nullptr ? sum_grad + at : nullptr, x + at, weight, rstd[row],
        x_grad + at, weight_grad, dim);
  }
}

/// sigmoid(g), and 1 - sigmoid(g) computed without cancellation.
struct Sigmoid {
  Floats value, rest;
};

/// Uses exp(-|g|), as on CUDA. With exp(-g), a large |g| could cause inf * 0 = NaN.
Sigmoid sigmoid(Floats g) {
  const Floats e = exp_or_0(g < 0.0F ? g : -g);
  const Floats large = 1.0F / (1.0F + e);
  const Floats small = e * large;
  return {g < 0.0F ? small : large, g < 0.0F ? large : small};
}

template <class T>
void silu_mul(const T* gate, const T* up, T* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats g = load(gate + i, n - i);
    store(out + i, g * sigmoid(g).value * load(up + i, n - i), n - i);
  }
}

template <class T>
void silu_mul_backward(const T* grad, const T* gate, const T* up, T* gate_grad, T* up_grad, T* out,
                       std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats g = load(gate + i, n - i);
    const Floats d = load(grad + i, n - i);
    const Floats u = load(up + i, n - i);
    const auto [value, rest] = sigmoid(g);
    const Floats silu = g * value;
    store(gate_grad + i, value * (1.0F + g * rest) * d * u, n - i);
    store(up_grad + i, d * silu, n - i);
    if (out != nullptr) {
      store(out + i, silu * u, n - i);  // silu(g) has the same bits as in forward
    }
  }
}

template <class T>
void rotary(const T* x, std::int64_t x_stride, const float* cos, const float* sin, T* out,
            std::int64_t heads, std::int64_t half, bool transposed) {
  for (std::int64_t h = 0; h < heads; ++h, x += x_stride, out += 2 * half) {
    for (std::int64_t i = 0; i < half; i += kLanes) {
      const std::int64_t n = half - i;
      const Floats x1 = load(x + i, n);
      const Floats x2 = load(x + half + i, n);
      const Floats sin1 = load(sin + i, n);
      const Floats sin2 = load(sin + half + i, n);
      const Floats across1 = transposed ? x2 * sin2 : -(x2 * sin1);
      const Floats across2 = transposed ? -(x1 * sin1) : x1 * sin2;
      store(out + i, x1 * load(cos + i, n) + across1, n);
      store(out + half + i, x2 * load(cos + half + i, n) + across2, n);
    }
  }
}

/// Processes a row of logits in blocks. The sums of a block are computed right after its maximum,
/// while the block is in the L1 cache.
template <class T>
void sums_of_logits(const T* x, std::int64_t n, float* maximum, float* exponentials,
                    float* differences) {
  constexpr std::int64_t kBlock = 1024;
  const float none = -__builtin_inff();
  float top = none;
  float from = 0;
  float exps = 0, diffs = 0;
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t end = n - i < kBlock ? n : i + kBlock;
    const float highest = largest(x + i, end - i);
    if (highest > top) {
      // If all logits before this block are -inf, the sum of exponentials so far is 0.
      exps *= top == none ? 0.0F : exp_or_0(broadcast(top - highest))[0];
      diffs += static_cast<float>(i) * (from - highest);
      from = top = highest;
    }
    Floats of_exps{}, of_diffs{};
    for (std::int64_t j = i; j < end; j += kLanes) {
      const Floats v = load(x + j, end - j) - from;
      const Ints here = lanes_below(end - j);
      of_exps += here ? exp_or_0(v) : Floats{};
      of_diffs += here ? v : Floats{};
    }
    exps += sum(of_exps);
    diffs += sum(of_diffs);
  }
  *maximum = top;
  *exponentials = exps;
  if (differences != nullptr) {
    *differences = diffs;
  }
}

template <class T>
void softmax(const T* x, T* out, std::int64_t n, float high, float low, float factor, float added) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load(x + i, n - i) - high - low;
    store(out + i, exp_or_0(v) * factor + added, n - i);
  }
}

template <class T>
constexpr RowKernels<T> make_kernels() {
  return {&rms_norm<T>, &rms_norm_backward<T>, &silu_mul<T>, &silu_mul_backward<T>,
          &rotary<T>,   &sums_of_logits<T>,    &softmax<T>};
}

const RowKernelTable kTable{make_kernels<float>(), make_kernels<Bf16>()};

}  // namespace tessera::kernels::TESSERA_ISA

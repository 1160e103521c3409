// silu(gate) * up and its gradients. The operation is elementwise, but runs row by row, because
// gate and up can be column ranges of one matrix.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

/// Arguments of silu_mul for `rows` rows of `size` elements. `gate_stride`, `up_stride`: elements
/// from one row's start to the next. The result is dense.
struct SiluMul {
  const void* gate = nullptr;
  const void* up = nullptr;
  std::int64_t gate_stride = 0;
  std::int64_t up_stride = 0;
  std::int64_t rows = 0;
  std::int64_t size = 0;
  void* out = nullptr;
};

struct SiluMulBackward {
  /// Arguments of the forward. If `forward.out` is not nullptr, backward also writes the forward's
  /// result.
  SiluMul forward;
  const void* grad = nullptr;  ///< gradient of the result, dense
  void* gate_grad = nullptr;
  void* up_grad = nullptr;
  std::int64_t gate_grad_stride = 0;  ///< row stride of `gate_grad`, in elements
  std::int64_t up_grad_stride = 0;
};

/// The sigmoid of g, and 1 - sigmoid(g) computed without cancellation.
struct Sigmoid {
  float value;
  float rest;
};

/// Uses exp(-|g|), which never overflows. With exp(-g), a large -g could cause inf * 0 = NaN.
TESSERA_HOST_DEVICE inline Sigmoid sigmoid(float g) {
  const float e = std::exp(-std::fabs(g));
  const float large = divide(1.0F, 1.0F + e);
  const float small = e * large;
  return g < 0.0F ? Sigmoid{small, large} : Sigmoid{large, small};
}

template <class T, int N>
TESSERA_HOST_DEVICE void silu_mul_row(const SiluMul& p, std::int64_t row, std::int64_t first,
                                      std::int64_t step) {
  const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
  const T* up = static_cast<const T*>(p.up) + row * p.up_stride;
  T* out = static_cast<T*>(p.out) + row * p.size;
  for (std::int64_t i = first * N; i < p.size; i += step * N) {
    const Floats<N> g = load<N>(gate + i, p.size - i);
    const Floats<N> u = load<N>(up + i, p.size - i);
    Floats<N> result;
    for (int k = 0; k < N; ++k) {
      result.at[k] = g.at[k] * sigmoid(g.at[k]).value * u.at[k];
    }
    store(out + i, result, p.size - i);
  }
}

/// Computes silu_mul's gradients of a row: silu'(g) = s * (1 + g * (1 - s)), s = sigmoid(g). Large
/// factors are multiplied last, against overflow.
template <class T, int N>
TESSERA_HOST_DEVICE void silu_mul_backward_row(const SiluMulBackward& p, std::int64_t row,
                                               std::int64_t first, std::int64_t step) {
  const SiluMul& in = p.forward;
  const T* gate = static_cast<const T*>(in.gate) + row * in.gate_stride;
  const T* up = static_cast<const T*>(in.up) + row * in.up_stride;
  const T* grad = static_cast<const T*>(p.grad) + row * in.size;
  T* gate_grad = static_cast<T*>(p.gate_grad) + row * p.gate_grad_stride;
  T* up_grad = static_cast<T*>(p.up_grad) + row * p.up_grad_stride;
  T* out = in.out != nullptr ? static_cast<T*>(in.out) + row * in.size : nullptr;
  for (std::int64_t i = first * N; i < in.size; i += step * N) {
    const std::int64_t n = in.size - i;
    const Floats<N> d = load<N>(grad + i, n);
    const Floats<N> g = load<N>(gate + i, n);
    const Floats<N> u = load<N>(up + i, n);
    Floats<N> of_gate;
    Floats<N> of_up;
    Floats<N> result;
    for (int k = 0; k < N; ++k) {
      const Sigmoid s = sigmoid(g.at[k]);
      result.at[k] = g.at[k] * s.value * u.at[k];
      of_gate.at[k] = d.at[k] * (s.value * std::fma(g.at[k], s.rest, 1.0F)) * u.at[k];
      of_up.at[k] = d.at[k] * (g.at[k] * s.value);
    }
    store(gate_grad + i, of_gate, n);
    store(up_grad + i, of_up, n);
    if (out != nullptr) {
      store(out + i, result, n);
    }
  }
}

/// Whether all rows of silu_mul's tensors can be accessed by vectors of 16 bytes.
inline bool is_aligned(const SiluMul& call, Element type) {
  return is_aligned(call.gate, call.rows, call.gate_stride, type) &&
         is_aligned(call.up, call.rows, call.up_stride, type) &&
         is_aligned(call.out, call.rows, call.size, type);
}
inline bool is_aligned(const SiluMulBackward& call, Element type) {
  const SiluMul& in = call.forward;
  return is_aligned(in, type) && is_aligned(call.grad, in.rows, in.size, type) &&
         is_aligned(call.gate_grad, in.rows, call.gate_grad_stride, type) &&
         is_aligned(call.up_grad, in.rows, call.up_grad_stride, type);
}

}  // namespace tessera::kernels

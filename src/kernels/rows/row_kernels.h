// CPU kernels for rows of tensors. The source, row_kernels.inl, is compiled once for each
// instruction set (row_kernels_*.cpp). row_kernels_baseline.cpp selects the instruction set at run
// time.
#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// The factor by which RMSNorm multiplies elements whose squares would overflow in fp32.
constexpr float kShrink = 0x1p-80F;
/// If 1 / rms of a row is below this limit, products of the row's elements and the gradient can
/// overflow.
constexpr float kHugeRstd = 0x1p-40F;

using Bf16 = std::uint16_t;  ///< the bits of a bfloat16 number

/// Kernels for rows of elements of type T. Rows are dense unless stated otherwise.
template <class T>
struct RowKernels {
  /// Computes RMSNorm of rows with `dim` elements, and writes 1 / rms to `rstd`. No weight
  /// (nullptr) means 1. With residual and sum, normalises x + residual and writes x + residual to
  /// `sum`.
  void (*rms_norm)(const T* x, const T* residual, const float* weight, T* sum, T* out, float* rstd,
                   std::int64_t rows, std::int64_t dim, float eps);
  /// Computes the gradients of RMSNorm. Adds the weight's gradient to `weight_grad`, which has
  /// `dim` elements. Rounds x_grad before adding sum_grad. weight_grad and sum_grad may be nullptr.
  void (*rms_norm_backward)(const T* grad, const T* sum_grad, const T* x, const float* weight,
                            const float* rstd, T* x_grad, float* weight_grad, std::int64_t rows,
                            std::int64_t dim);
  void (*silu_mul)(const T* gate, const T* up, T* out, std::int64_t n);
  /// Computes the gradients of silu_mul. Unless `out` is nullptr, also writes the result to `out`.
  void (*silu_mul_backward)(const T* grad, const T* gate, const T* up, T* gate_grad, T* up_grad,
                            T* out, std::int64_t n);
  /// Rotates `heads` vectors of 2 * half elements at one position (rotary embedding). The vectors
  /// are x_stride elements apart in x, and dense in out.
  void (*rotary)(const T* x, std::int64_t x_stride, const float* cos, const float* sin, T* out,
                 std::int64_t heads, std::int64_t half, bool transposed);
  /// Computes the maximum m of n logits x (-inf if n is 0), and the sum of exp(x - m). Also sums x
  /// - m unless `differences` is nullptr. If m is -inf, both sums use x instead of x - m.
  void (*sums_of_logits)(const T* x, std::int64_t n, float* maximum, float* exponentials,
                         float* differences);
  /// Computes out = exp(x - high - low) * factor + added for a row of logits x with log-sum-exp
  /// high + low. `out` and `x` may be the same memory.
  void (*softmax)(const T* x, T* out, std::int64_t n, float high, float low, float factor,
                  float added);
};

struct RowKernelTable {
  RowKernels<float> fp32;
  RowKernels<Bf16> bf16;
};

/// Whether the processor has the AVX-512 extensions of x86-64-v4.
bool has_avx512();

/// Returns the row kernels for the best instruction set of this machine. All instruction sets give
/// the same bits.
const RowKernelTable& row_kernels();

namespace baseline {
extern const RowKernelTable kTable;
}
namespace avx2 {
extern const RowKernelTable kTable;
}
namespace avx512 {
extern const RowKernelTable kTable;
}

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END

// The table of row kernels. Their source, row_kernels.inl, is compiled once for each instruction
// set (row_kernels_*.cpp); the choice is made when the program runs, in row_kernels_baseline.cpp.
#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

using Bf16 = std::uint16_t;  ///< the bits of a bfloat16

/// Kernels over rows in memory, for elements of type T. Rows are dense unless it says otherwise.
template <class T>
struct RowKernels {
  /// Rows of `dim`; weight may be null (ones); rstd: one per row. Of x + residual, which is written
  /// to `sum`, unless these are null.
  void (*rms_norm)(const T* x, const T* residual, const float* weight, T* sum, T* out, float* rstd,
                   std::int64_t rows, std::int64_t dim, float eps);
  /// Adds to weight_grad (dim), and sum_grad to x_grad, which is rounded before; unless they are
  /// null.
  void (*rms_norm_backward)(const T* grad, const T* sum_grad, const T* x, const float* weight,
                            const float* rstd, T* x_grad, float* weight_grad, std::int64_t rows,
                            std::int64_t dim);
  void (*silu_mul)(const T* gate, const T* up, T* out, std::int64_t n);
  /// The product too, unless `out` is null.
  void (*silu_mul_backward)(const T* grad, const T* gate, const T* up, T* gate_grad, T* up_grad,
                            T* out, std::int64_t n);
  /// One position: `heads` vectors of 2 * half, x_stride apart; out is dense.
  void (*rotary)(const T* x, std::int64_t x_stride, const float* cos, const float* sin, T* out,
                 std::int64_t heads, std::int64_t half, bool transposed);
  /// For a row of logits the maximum, -inf without any; the sum of exp(x - maximum), or of exp(x)
  /// where that is -inf; and unless it is null, the sum of x relative to the same.
  void (*sums_of_logits)(const T* x, std::int64_t n, float* maximum, float* exponentials,
                         float* differences);
  /// out = exp(x - high - low) * factor + added, of a log-sum-exp that is the sum of both. May be
  /// in the place of x.
  void (*softmax)(const T* x, T* out, std::int64_t n, float high, float low, float factor,
                  float added);
  /// sum += x, and out = sum rounded.
  void (*add)(const T* x, float* sum, std::int64_t n);
  void (*round)(const float* sum, T* out, std::int64_t n);
};

struct RowKernelTable {
  RowKernels<float> fp32;
  RowKernels<Bf16> bf16;
};

/// The kernels for the best instruction set that this machine has. All sets give the same bits.
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

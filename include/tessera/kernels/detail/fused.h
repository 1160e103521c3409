#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "tessera/export.h"

/// Memory-bound operations on local tensors, without autograd. Each operation is one pass over
/// memory. Results have the same bits on every CPU, and in every run on CUDA. The CPU has kernels
/// for fp32 and bf16, CUDA also for fp16. Other types and devices use ATen operators with the same
/// formulas.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// The results of rms_norm().
struct RmsNormResult {
  at::Tensor out;   ///< the normalised tensor, with the sizes and type of x
  at::Tensor rstd;  ///< 1 / sqrt(mean(x^2) + eps) of each row: (..., 1), fp32 or fp64
};
/// Computes RMSNorm (Zhang and Sennrich 2019) over the last dimension. `weight`: (size of the last
/// dimension), or undefined for a weight of ones.
RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// The results of add_rms_norm().
struct AddRmsNormResult {
  at::Tensor out;   ///< the norm of `sum`, with the sizes and type of x
  at::Tensor sum;   ///< x + residual, rounded to the type of x
  at::Tensor rstd;  ///< 1 / rms of each row of `sum`; like RmsNormResult::rstd
};
/// Returns the sum x + residual and its rms_norm, with the same bits as two separate operations.
/// `residual` has the sizes and type of x.
AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const at::Tensor& weight, double eps);
/// Returns RMSNorm's gradients of x and, if `weight` is defined, of `weight`, summed over the local
/// rows. For add_rms_norm(), pass the result `sum` as `x`, and the gradient of `sum` as `sum_grad`.
/// The first result is then the gradient of both inputs of add_rms_norm().
std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad = {});

/// Returns silu(gate) * up for tensors of one shape (SwiGLU, Shazeer 2020).
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);
/// Returns the gradients of gate and up in silu_mul(gate, up).
std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up);
/// Returns silu_mul(gate, up) and the gradients of gate and up, in one pass. The first result has
/// the same bits as silu_mul(gate, up).
std::tuple<at::Tensor, at::Tensor, at::Tensor> silu_mul_with_gradients(const at::Tensor& grad,
                                                                       const at::Tensor& gate,
                                                                       const at::Tensor& up);
/// Applies rotary position embedding (Su et al. 2021), in Llama's form: (x1 cos1 - x2 sin1, x2 cos2
/// + x1 sin2) for the halves along head_dim. x: (batch, sequence, heads, head_dim); cos, sin:
/// (sequence, head_dim). `transposed`: computes the gradient.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed);
/// Like rotary_embedding(), for queries `q` and keys `k` in one pass. Queries and keys may have
/// different numbers of heads.
std::pair<at::Tensor, at::Tensor> rotary_embedding_qk(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      bool transposed);
/// Looks up rows of an embedding table of `total_rows` rows. `weight`: a shard, with the rows from
/// `first_row` on. Returns (..., dim), with zeros for rows of other shards. For an index outside of
/// the table, throws Error on a CPU, and fails an assertion on CUDA.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows);
/// Returns the gradient of a shard of `rows` rows of an embedding table. Sums are in fp32 (fp64 for
/// fp64). The bits of the result do not depend on the number of threads, and are equal in every run
/// on CUDA.
at::Tensor embedding_rows_backward(const at::Tensor& grad, const at::Tensor& indices,
                                   std::int64_t first_row, std::int64_t rows);

// FP8 (float8_e4m3fn) matrix products of a linear layer. The scales are powers of two, one for each
// row or one for each column of a matrix.

/// A matrix in fp8: row i is scales[i] * values[i].
struct Fp8Rows {
  at::Tensor values;  ///< the fp8 values: (rows, columns), float8_e4m3fn, contiguous
  at::Tensor scales;  ///< the scales of the rows: (rows, 1), fp32, powers of two
};

/// Quantises the rows of x, or of x * `factors` if defined. x: (rows, columns), floating-point.
/// `factors`: (1, columns), powers of two. The scale of a row is the smallest power of two, at
/// least 2^-100, with max |x| / scale <= 448. Values are x / scale, rounded to nearest even. The
/// error is bounded by
///
///   |x - scale * value| <= max(2^-4 |x|, 2^-10 scale).
///
/// All values of a row with a NaN or an infinity are NaN. Quantising the result again changes
/// nothing.
Fp8Rows quantize_fp8(const at::Tensor& x, const at::Tensor& factors = {});

/// The three matrix products of a linear layer. CUDA uses at::_scaled_mm: bf16, weight sizes that
/// are multiples of 16, compute capability 8.9 or more. fp8_linear() on CUDA uses fast
/// accumulation. Other devices sum in fp32 (fp64 for fp64). Throw Error for unsupported types,
/// sizes and devices.

/// Computes x * weight^T: (..., in), (out, in) -> (..., out). Each row of x and of weight has a
/// scale.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
/// Computes grad * weight (matrices): (..., out), (out, in) -> (..., in). Quantises the weight like
/// fp8_linear(), multiplies grad by the weight's row scales, then quantises grad's rows.
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
/// Computes grad^T * x: (..., out), (..., in) -> (out, in). Quantises grad and x to FP8 with one
/// scale for each column of this rank's rows.
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);

}  // namespace tessera::kernels
TESSERA_API_END

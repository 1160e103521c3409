#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "tessera/export.h"

/// Memory-bound operations, each in one pass over memory, on local tensors, without autograd. For
/// fp32 and bf16 on a CPU this library has vectorised kernels, with fp32 arithmetic and one
/// rounding. The order of operations depends neither on the instruction set nor on the number of
/// threads, so results have the same bits on every CPU. CUDA kernels exist for fp32, bf16 and fp16,
/// and give the same bits in every run. An operation takes one kernel launch, or two for the
/// gradient of a norm's weight or of an embedding table. Tensors of another type or device use ATen
/// operators with the same formulas.
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
/// Returns RMSNorm's gradients of x and, if `weight` is defined, of `weight`. The weight's gradient
/// is summed over the rows of the local tensor `x`. For the backward of add_rms_norm(), pass its
/// result `sum` as `x`, and the gradient of `sum` as `sum_grad` (shape and type of x; may be
/// undefined). RMSNorm's gradient of x is rounded before `sum_grad` is added. The first result is
/// then the gradient of both inputs of add_rms_norm().
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
/// Applies rotary position embedding (Su et al. 2021), in Llama's form. x: (batch, sequence, heads,
/// head_dim); cos, sin: (sequence, head_dim). With the halves x1 and x2 of x along head_dim, and
/// the halves of cos and sin: returns (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2). If `transposed`,
/// applies the transposed rotation, which is the gradient.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed);
/// Like rotary_embedding(), for queries `q` and keys `k` in one pass. Queries and keys may have
/// different numbers of heads.
std::pair<at::Tensor, at::Tensor> rotary_embedding_qk(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      bool transposed);
/// Looks up rows in a shard of an embedding table. The table has `total_rows` rows; the shard
/// `weight` has the rows from `first_row` on. Returns (..., dim), with zeros for rows that are in
/// other shards. An index outside of the table throws Error on a CPU, and fails a device assertion
/// on CUDA.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows);
/// Returns the gradient of a shard of an embedding table; the shard has `rows` rows. The gradients
/// of all tokens with equal indices are added in the order of `indices`, in fp32 (in fp64 if `grad`
/// is fp64), so the result has the same bits for every number of threads. On CUDA the sums are
/// split in a way that depends only on the indices, so every run gives the same bits.
at::Tensor embedding_rows_backward(const at::Tensor& grad, const at::Tensor& indices,
                                   std::int64_t first_row, std::int64_t rows);

// FP8 (float8_e4m3fn) matrix products of a linear layer. A matrix is quantised with scales that are
// powers of two: one scale for each row, or one scale for each column.

/// A matrix in fp8: row i is scales[i] * values[i].
struct Fp8Rows {
  at::Tensor values;  ///< the fp8 values: (rows, columns), float8_e4m3fn, contiguous
  at::Tensor scales;  ///< the scales of the rows: (rows, 1), fp32, powers of two
};

/// Quantises the rows of x, or of x * `factors` if defined. x: (rows, columns), of any
/// floating-point type. `factors`: (1, columns), powers of two. The scale of a row is the smallest
/// power of two, at least 2^-100, for which the row's largest absolute value divided by the scale
/// is at most 448. An fp8 value is the exact quotient x / scale, rounded to nearest, ties to even.
/// Therefore
///
///   |x - scale * value| <= max(2^-4 |x|, 2^-10 scale),
///
/// and the rounding does not depend on the scale if |x| >= 2^-6 scale (normal fp8 numbers).
/// Quantising the result again changes nothing. Rows of zeros stay zeros. float8_e4m3fn has no
/// infinity: the fp8 values of a row with a NaN or an infinity are all NaN.
Fp8Rows quantize_fp8(const at::Tensor& x, const at::Tensor& factors = {});

/// The three matrix products of a linear layer. On CUDA the functions use at::_scaled_mm with a
/// scale for each row. That operator requires bf16, weight sizes that are multiples of 16, and
/// compute capability 8.9 or more; otherwise the functions throw Error. On CUDA fp8_linear() uses
/// fast accumulation, in which sums have fewer bits. On other devices the fp8 values are multiplied
/// and summed in fp32 (fp64 for fp64), and rounded once. The functions throw Error for fp16, whose
/// range is too small for the scales.

/// Computes x * weight^T: (..., in), (out, in) -> (..., out). Each row of x and of weight has a
/// scale.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
/// Computes grad * weight (matrices): (..., out), (out, in) -> (..., in). Quantises the weight like
/// fp8_linear(), multiplies grad by the weight's row scales, then quantises grad's rows.
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
/// Computes grad^T * x: (..., out), (..., in) -> (out, in). Quantises grad and x to FP8 with a
/// scale for each column, computed from the rows of this rank only.
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);

}  // namespace tessera::kernels
TESSERA_API_END

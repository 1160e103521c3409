#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "tessera/export.h"

/// Memory-bound operations in one pass over memory, on local tensors, without autograd. fp32 and
/// bf16 on CPU run on our own vectorised kernels, with fp32 arithmetic and one rounding. Their
/// order of operations depends neither on the instruction set nor on the number of threads: same
/// bits. On CUDA they run on kernels for fp32, bf16 and fp16, one launch each and two for the
/// gradients of a norm's weight and of a table: same bits in every run. Other types, devices and
/// operations run the same formulas as ATen operators.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// The results of rms_norm.
struct RmsNormResult {
  at::Tensor out;   ///< like x
  at::Tensor rstd;  ///< 1 / sqrt(mean(x^2) + eps), one per row: (..., 1), fp32 or fp64
};
/// RMSNorm (Zhang and Sennrich 2019) over the last dimension. weight: (last size), or undefined for
/// ones.
RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// Gradients of x and, if it is defined, weight; the latter is summed over the rows of this tensor.
std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd);

/// The results of add_rms_norm.
struct AddRmsNormResult {
  at::Tensor out;   ///< like x: the norm of `sum`
  at::Tensor sum;   ///< like x: x + residual, rounded
  at::Tensor rstd;  ///< as RmsNormResult::rstd, of the rows of `sum`
};
/// rms_norm of x + residual, with the bits of the sum and its norm as two operations. residual: of
/// the sizes and type of x.
AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const at::Tensor& weight, double eps);
/// The same gradients where x, the sum of an add_rms_norm, has the gradient `sum_grad` as well,
/// which is added to that of x: with the bits of the addition as another operation, so in bf16 and
/// fp16 it is the rounded gradient of the norm that it is added to. That is the gradient of the
/// call's x and of its residual alike. sum_grad: like x, or undefined.
std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad);

/// silu(gate) * up, of tensors of one shape (SwiGLU, Shazeer 2020).
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);
/// Gradients of gate and up.
std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up);
/// silu_mul(gate, up) again, bit-equal, and the gradients of gate and up, in one pass.
std::tuple<at::Tensor, at::Tensor, at::Tensor> silu_mul_with_gradients(const at::Tensor& grad,
                                                                       const at::Tensor& gate,
                                                                       const at::Tensor& up);
/// Rotary position embedding (Su et al. 2021), in the form of Llama. x: (batch, sequence, heads,
/// head_dim), of halves (x1, x2); cos, sin: (sequence, head_dim). Gives (x1 cos1 - x2 sin1, x2 cos2
/// + x1 sin2), or with `transposed` the adjoint of that, which is its gradient.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed);
/// The same of queries and keys, which may have other numbers of heads, in one pass.
std::pair<at::Tensor, at::Tensor> rotary_embedding_qk(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      bool transposed);
/// Embedding with a shard of the table: `weight` holds rows first_row, first_row + 1, ... of
/// `total_rows`. Gives (..., dim), zeros for indices of other rows. An index outside of the table
/// throws Error on a CPU, and on CUDA fails an assertion of the device.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows);
/// The gradient of those `rows` rows. Each row's terms are added in the order of their positions,
/// in fp32 (fp64 for fp64): same bits for any number of threads. On CUDA parts of that order are
/// summed first, which the indices alone decide.
at::Tensor embedding_rows_backward(const at::Tensor& grad, const at::Tensor& indices,
                                   std::int64_t first_row, std::int64_t rows);

/// For main(): from now on oneDNN computes large fp32 products of matrices (`mm`, `addmm`) of this
/// process on processors for which MKL has no kernels of full vector width, AMD's with AVX-512.
/// Elsewhere it does nothing. The choice depends on the processor and the sizes alone.
void use_fast_products();

}  // namespace tessera::kernels
TESSERA_API_END

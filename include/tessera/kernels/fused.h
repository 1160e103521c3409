#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

/// Memory-bound operations in one pass, on local tensors, without autograd. fp32 and bf16 on CPU
/// run on our own vectorised kernels (fp32 arithmetic, one rounding), in an order of operations
/// that depends neither on the instruction set nor on the number of threads; other types and
/// devices run the same formulas as ATen operators.
namespace tessera::kernels {

struct RmsNormResult {
  at::Tensor out;   ///< like x
  at::Tensor rstd;  ///< 1 / sqrt(mean(x^2) + eps), one per row
};
/// Over the last dimension. weight: (last size), or undefined for ones.
RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// Gradients of x and (if defined) weight; the latter summed over this tensor's rows.
std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd);

/// silu(gate) * up.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);
/// Gradients of gate and up.
std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up);

/// x: (batch, sequence, heads, head_dim) with halves (x1, x2); cos, sin: (sequence, head_dim).
/// (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2), or with `transposed` the adjoint of that.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed);

/// Rows first_row, first_row + 1, ... of a table of `total_rows`, of which `weight` holds some:
/// (..., dim), zeros for indices that lie elsewhere. On CPU an index outside the table is an Error.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows);
/// Gradient of those `rows` rows; each row's terms are added in order of position, in fp32.
at::Tensor embedding_rows_backward(const at::Tensor& grad, const at::Tensor& indices,
                                   std::int64_t first_row, std::int64_t rows);

}  // namespace tessera::kernels

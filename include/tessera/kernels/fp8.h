#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "tessera/export.h"

/// The products of a linear layer with factors in float8_e4m3fn, on local tensors, without
/// autograd. Each row of a factor along which a product sums has a scale, a power of two.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// A matrix whose row i is scales[i] * values[i].
struct Fp8Rows {
  at::Tensor values;  ///< (rows, columns), float8_e4m3fn, contiguous
  at::Tensor scales;  ///< (rows, 1), fp32, powers of two
};

/// The rows of x, (rows, columns) of any floating-point type, in eight bits. The scale of a row is
/// the least power of two, 2^-100 at least, with which its largest element is no more than 448; a
/// value is x / scale, which is exact, rounded to the nearest, ties to even. So
///
///   |x - scale * value| <= max(2^-4 |x|, 2^-10 scale),
///
/// and values of 2^-6 scale or more do not depend on the scale. Quantising a second time changes
/// nothing. Rows of zeros stay zeros. A row with a NaN or an infinity, which the format lacks, is
/// NaN, and so is its row of a product.
Fp8Rows quantize_fp8(const at::Tensor& x);

/// On CUDA at::_scaled_mm with a scale for each row: bf16, both sizes of the weight multiples of 16
/// and compute capability 8.9 or more, else Error. On other devices the products of the same
/// values, summed in fp32 (fp64 for fp64) and rounded once. Throws Error for fp16, which lacks the
/// range of the scales.

/// x weight^T: (..., in), (out, in) -> (..., out). Scales for the rows of both.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
/// grad weight: (..., out), (out, in) -> (..., in). The weight's values and scales are those of
/// fp8_linear(): the scales are multiplied into grad, whose rows are scaled then.
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
/// grad^T x: (..., out), (..., in) -> (out, in). Scales for the columns of both, over these rows.
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);

}  // namespace tessera::kernels
TESSERA_API_END

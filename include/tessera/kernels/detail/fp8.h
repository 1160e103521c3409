#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "tessera/export.h"

/// The products of a linear layer with factors in float8_e4m3fn, on local tensors, without
/// autograd. Each row of a factor along which a product sums has a scale, which is a power of two.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// A matrix in fp8: row i is scales[i] * values[i].
struct Fp8Rows {
  at::Tensor values;  ///< the fp8 values: (rows, columns), float8_e4m3fn, contiguous
  at::Tensor scales;  ///< the scales of the rows: (rows, 1), fp32, powers of two
};

/// Quantises the rows of x, (rows, columns) of any floating-point type. The scale of a row is the
/// smallest power of two, at least 2^-100, for which the largest element divided by the scale is at
/// most 448. A value is x / scale, which is exact, rounded to nearest, ties to even. Therefore
///
///   |x - scale * value| <= max(2^-4 |x|, 2^-10 scale),
///
/// and elements of 2^-6 scale or more do not depend on the scale. Quantising a second time changes
/// nothing. Rows of zeros stay zeros. The format has no infinity; a row with a NaN or an infinity
/// becomes NaN, and the corresponding row of a product too.
Fp8Rows quantize_fp8(const at::Tensor& x);

/// The three products of a linear layer. On CUDA the functions use at::_scaled_mm with a scale for
/// each row, which requires bf16, both sizes of the weight multiples of 16, and compute capability
/// 8.9 or more; otherwise the functions throw Error. On CUDA fp8_linear() uses fast accumulation,
/// in which sums have fewer bits. On other devices the products of the fp8 values are summed in
/// fp32 (fp64 for fp64) and rounded once. The functions throw Error for fp16, whose range is too
/// small for the scales.

/// Computes x weight^T: (..., in), (out, in) -> (..., out). The rows of both factors are scaled.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
/// Computes grad weight: (..., out), (out, in) -> (..., in). The weight's values and scales are
/// those of fp8_linear(): the scales are multiplied into grad, whose rows are then scaled.
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
/// Computes grad^T x: (..., out), (..., in) -> (out, in). The columns of both factors are scaled,
/// over the rows of this tensor.
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);

}  // namespace tessera::kernels
TESSERA_API_END

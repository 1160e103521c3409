// fp8 (e4m3) matrix products with torchao's "rowwise" scaling. Scales are powers of two, so scales
// of a whole row and of a shard give equal products, except for rounding of subnormal fp8 values.
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/detail/fused.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

#include "device/quantize_fp8.h"
#include "fused_dispatch.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

constexpr c10::ScalarType kFp8 = c10::ScalarType::Float8_e4m3fn;
/// at::_scaled_mm requires that both sizes of the second matrix are multiples of this number.
constexpr std::int64_t kMultiple = 16;

/// Returns 2^(number - 127). `number` is the biased exponent of an fp32 number.
at::Tensor power_of_two(const at::Tensor& number) {
  return at::bitwise_left_shift(number, 23).view(at::kFloat);
}

Fp8Rows composed_quantized(const at::Tensor& x) {
  const at::Tensor amax = x.size(1) == 0 ? at::zeros({x.size(0), 1}, x.options().dtype(at::kFloat))
                                         : at::amax(x.abs(), {1}, /*keepdim=*/true).to(at::kFloat);
  // The same bit arithmetic as fp8_scale() in device/quantize_fp8.h. A NaN can be negative, so the
  // sign bit is removed. Clamping prevents overflow.
  const at::Tensor bits =
      amax.view(at::kInt).bitwise_and(0x7FFFFFFF).clamp_max(0x7F800000) + 0x1FFFFF;
  // The smallest scale is 2^-100, so that its inverse and all bf16 results are normal numbers.
  const at::Tensor exponents = (at::bitwise_right_shift(bits, 23) - 8).clamp_min(127 - 100);
  // amax - amax is NaN if a row has a NaN or infinite element, otherwise 0. The inverse scale must
  // then be NaN, because fp8 casts saturate on some processors.
  const at::Tensor inverse = power_of_two(254 - exponents) + (amax - amax);
  const at::Tensor scaled = x.to(compute_type(x)) * inverse;
  return {scaled.to(kFp8).contiguous(), power_of_two(exponents)};
}

Fp8Rows quantized_on_cuda(const at::Tensor& x, const at::Tensor& factors) {
  const at::Tensor in = x.stride(1) == 1 ? x : x.contiguous();
  Fp8Rows rows{at::empty(x.sizes(), x.options().dtype(kFp8)),
               at::empty({x.size(0), 1}, x.options().dtype(at::kFloat))};
  const at::Tensor dense = factors.defined() ? factors.contiguous() : factors;
  const QuantizeFp8 call{.x = in.const_data_ptr(),
                         .factors = dense.defined() ? dense.const_data_ptr<float>() : nullptr,
                         .stride = in.stride(0),
                         .rows = in.size(0),
                         .columns = in.size(1),
                         .values = static_cast<std::uint8_t*>(rows.values.mutable_data_ptr()),
                         .scales = rows.scales.mutable_data_ptr<float>()};
  run_cuda_kernel(call, "tessera::quantize_fp8", {&in, 1}, {rows.values, rows.scales}, in);
  return rows;
}

}  // namespace

Fp8Rows quantize_fp8(const at::Tensor& x, const at::Tensor& factors) {
  if (has_cuda_kernels(x) && x.numel() > 0) {
    return quantized_on_cuda(x, factors);
  }
  return composed_quantized(factors.defined() ? x * factors.to(x.scalar_type()) : x);
}

namespace {

/// On a GPU, adds rows of zeros to x until the number of rows is a multiple of 16.
at::Tensor with_rows_for_gpu(const at::Tensor& x) {
  const std::int64_t missing = tessera::detail::round_up(x.size(0), kMultiple) - x.size(0);
  return missing == 0 || !runs_on_cuda(x) ? x : at::constant_pad_nd(x, {0, 0, 0, missing});
}

/// Returns the matrix product a b^T in the element type `type`. If `fast`, tensor cores accumulate
/// with fewer bits. As in torchao's recipe, only forward sets `fast`.
at::Tensor product(const Fp8Rows& a, const Fp8Rows& b, c10::ScalarType type, bool fast) {
  TESSERA_CHECK(type != at::kHalf,
                "an FP8 matrix product of fp16 tensors is not supported: the scales exceed the "
                "range of fp16; use bf16 or fp32");
  if (!runs_on_cuda(a.values)) {
    const c10::ScalarType sums = type == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor sum = at::mm(a.values.to(sums), b.values.to(sums).t());
    return sum.mul_(a.scales).mul_(b.scales.t()).to(type);
  }
  TESSERA_CHECK(type == at::kBFloat16, "an FP8 matrix product of tensors of type ", type,
                " is not supported on CUDA; use bf16");
  TESSERA_CHECK(b.values.size(0) % kMultiple == 0 && b.values.size(1) % kMultiple == 0,
                "an FP8 matrix product with a matrix of sizes ", b.values.sizes(),
                " is not supported; on CUDA both sizes must be multiples of ", kMultiple);
  if (a.values.numel() == 0 || b.values.numel() == 0) {
    return at::zeros({a.values.size(0), b.values.size(0)}, a.scales.options().dtype(type));
  }
  return at::_scaled_mm(a.values, b.values.t(), a.scales, b.scales.t(), /*bias=*/{},
                        /*scale_result=*/{}, type, /*use_fast_accum=*/fast);
}

at::Tensor as_rows(const at::Tensor& x) {
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

at::Tensor shaped(const at::Tensor& rows, const at::Tensor& like) {
  return like.dim() == 1 ? rows.squeeze(0)
                         : rows.unflatten(0, like.sizes().slice(0, like.dim() - 1));
}

}  // namespace

at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor y =
      product(quantize_fp8(as_rows(x)), quantize_fp8(weight), x.scalar_type(), true);
  return shaped(y, x);
}

at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight) {
  const Fp8Rows w = quantize_fp8(weight);
  const c10::ScalarType type = weight.scalar_type();
  const Fp8Rows columns{w.values.t().contiguous(),
                        at::ones({weight.size(1), 1}, w.scales.options())};
  const Fp8Rows scaled = quantize_fp8(as_rows(grad.to(type)), w.scales.t());
  return shaped(product(scaled, columns, type, false), grad);
}

at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x) {
  const at::Tensor rows = with_rows_for_gpu(as_rows(grad.to(x.scalar_type())));
  const at::Tensor inputs = with_rows_for_gpu(as_rows(x));
  return product(quantize_fp8(rows.t()), quantize_fp8(inputs.t()), x.scalar_type(), false);
}

}  // namespace tessera::kernels

// Row-wise scaling as in torchao's "rowwise" recipe: e4m3 for all factors, with scales that are
// powers of two. Such a scale changes the bits of a value only if the value is subnormal, so a
// row's values are the same on a rank that has only a part of the row.
#include "tessera/kernels/fp8.h"

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
#include <vector>

#include "device/quantize_fp8.h"
#include "fused_dispatch.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

constexpr c10::ScalarType kFp8 = c10::ScalarType::Float8_e4m3fn;
/// at::_scaled_mm requires multiples of this number for both sizes of the second factor.
constexpr std::int64_t kMultiple = 16;

/// The biased exponents of the scales of rows with these fp32 maxima.
at::Tensor scale_exponents(const at::Tensor& amax) {
  // 448 is 1.75 * 2^8. The sum carries into the exponent if the fraction is above 0.75. Clamped,
  // because the bits of a NaN could overflow.
  const at::Tensor bits = amax.view(at::kInt).clamp_max(0x7F800000);
  const at::Tensor rounded = at::bitwise_right_shift(bits + 0x1FFFFF, 23);
  // With scales from 2^-100 on, the inverse is a normal number, and so are all values in bf16.
  return (rounded - 8).clamp_min(127 - 100);
}

at::Tensor power_of_two(const at::Tensor& biased_exponents) {
  return at::bitwise_left_shift(biased_exponents, 23).view(at::kFloat);
}

at::Tensor row_maxima(const at::Tensor& x) {
  return x.size(1) == 0 ? at::zeros({x.size(0), 1}, x.options().dtype(at::kFloat))
                        : at::amax(x.abs(), {1}, /*keepdim=*/true).to(at::kFloat);
}

Fp8Rows composed_quantized(const at::Tensor& x) {
  const at::Tensor amax = row_maxima(x);
  const at::Tensor exponents = scale_exponents(amax);
  // amax - amax is 0, or NaN for a row that is not finite; needed because casts saturate on some
  // processors.
  const at::Tensor inverse = power_of_two(254 - exponents) + (amax - amax);
  const at::Tensor scaled = x.to(compute_type(x)) * inverse;
  return {scaled.to(kFp8).contiguous(), power_of_two(exponents)};
}

/// One launch for rows of consecutive elements, two for columns.
Fp8Rows quantized_on_cuda(const at::Tensor& x, const at::Tensor& factors) {
  const bool by_columns = x.stride(1) != 1 && x.stride(0) == 1;
  const at::Tensor in = by_columns || x.stride(1) == 1 ? x : x.contiguous();
  Fp8Rows rows{at::empty(x.sizes(), x.options().dtype(kFp8)),
               at::empty({x.size(0), 1}, x.options().dtype(at::kFloat))};
  const at::Tensor maxima = at::zeros({by_columns ? x.size(0) : 0}, x.options().dtype(at::kInt));
  const at::Tensor multiplied = factors.defined() ? factors.contiguous() : factors;
  const QuantizeFp8 call{
      .x = in.const_data_ptr(),
      .factors = multiplied.defined() ? multiplied.const_data_ptr<float>() : nullptr,
      .row_stride = in.stride(0),
      .column_stride = in.stride(1),
      .rows = in.size(0),
      .columns = in.size(1),
      .values = static_cast<std::uint8_t*>(rows.values.mutable_data_ptr()),
      .scales = rows.scales.mutable_data_ptr<float>(),
      .maxima = static_cast<std::uint32_t*>(maxima.mutable_data_ptr())};
  if (in_fake_mode()) {
    observe_fake_call({"tessera::quantize_fp8",
                       {in},
                       by_columns ? std::vector{in, in} : std::vector{in},
                       {rows.values, rows.scales}});
  } else {
    launch_cuda(call, in);
  }
  return rows;
}

/// Quantises the rows of x times `factors`, (1, columns) powers of two, or undefined for ones.
Fp8Rows quantized(const at::Tensor& x, const at::Tensor& factors) {
  if (has_cuda_kernels(x) && x.numel() > 0) {
    return quantized_on_cuda(x, factors);
  }
  return composed_quantized(factors.defined() ? x * factors.to(x.scalar_type()) : x);
}

/// Whether products use libtorch's fp8 matmul. A memory plan for a GPU makes the GPU's calls.
bool has_scaled_products(const at::Tensor& x) {
  return x.is_cuda() || (x.is_cpu() && fake_device() == c10::DeviceType::CUDA);
}

/// Pads x with rows of zeros to a multiple of 16; they do not change sums over rows.
at::Tensor with_rows_for_gpu(const at::Tensor& x) {
  const std::int64_t missing = tessera::detail::round_up(x.size(0), kMultiple) - x.size(0);
  return missing == 0 || !has_scaled_products(x) ? x : at::constant_pad_nd(x, {0, 0, 0, missing});
}

void check_range(c10::ScalarType type) {
  TESSERA_CHECK(type != at::kHalf,
                "fp8 rows in fp16 were asked for, which lacks the range of their scales; take bf16 "
                "or fp32");
}

/// The product a b^T in type `type`.
at::Tensor product(const Fp8Rows& a, const Fp8Rows& b, c10::ScalarType type) {
  check_range(type);
  if (!has_scaled_products(a.values)) {
    const c10::ScalarType sums = type == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor sum = at::mm(a.values.to(sums), b.values.to(sums).t());
    return sum.mul_(a.scales).mul_(b.scales.t()).to(type);
  }
  TESSERA_CHECK(type == at::kBFloat16, "a product in fp8 of tensors of type ", type,
                " was asked for; on CUDA its results are bf16");
  TESSERA_CHECK(b.values.size(0) % kMultiple == 0 && b.values.size(1) % kMultiple == 0,
                "a product in fp8 with a factor of sizes ", b.values.sizes(),
                " was asked for; on CUDA both must be multiples of ", kMultiple);
  if (a.values.numel() == 0 || b.values.numel() == 0) {
    return at::zeros({a.values.size(0), b.values.size(0)}, a.scales.options().dtype(type));
  }
  return at::_scaled_mm(a.values, b.values.t(), a.scales, b.scales.t(), /*bias=*/{},
                        /*scale_result=*/{}, type);
}

at::Tensor as_rows(const at::Tensor& x) {
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

/// `rows` reshaped to the leading sizes of `like`.
at::Tensor shaped(const at::Tensor& rows, const at::Tensor& like) {
  std::vector<std::int64_t> sizes = like.sizes().vec();
  sizes.back() = rows.size(1);
  return rows.reshape(sizes);
}

}  // namespace

Fp8Rows quantize_fp8(const at::Tensor& x) {
  return quantized(x, {});
}

at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  return shaped(product(quantize_fp8(as_rows(x)), quantize_fp8(weight), x.scalar_type()), x);
}

at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight) {
  const Fp8Rows w = quantize_fp8(weight);
  const c10::ScalarType type = weight.scalar_type();
  const Fp8Rows columns{w.values.t().contiguous(),
                        at::ones({weight.size(1), 1}, w.scales.options())};
  const Fp8Rows scaled = quantized(as_rows(grad.to(type)), w.scales.t());
  return shaped(product(scaled, columns, type), grad);
}

at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x) {
  const at::Tensor rows = with_rows_for_gpu(as_rows(grad.to(x.scalar_type())));
  return product(quantize_fp8(rows.t()), quantize_fp8(with_rows_for_gpu(as_rows(x)).t()),
                 x.scalar_type());
}

}  // namespace tessera::kernels

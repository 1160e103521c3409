// RMSNorm of a tensor or of the sum of two, forward and backward, with fp32 statistics.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "device/rms_norm.h"
#include "fused_dispatch.h"
#include "parallel.h"
#include "tessera/kernels/fused.h"

namespace tessera::kernels {
namespace {

// The rows are summed in this many blocks, whatever the number of threads, so that the weight's
// gradient has the same bits for any number.
constexpr std::int64_t kBlocks = 16;

/// How the rows are shared among threads: `grain` rows are some 16 K elements, enough for a task.
struct Rows {
  explicit Rows(const at::Tensor& x)
      : dim(x.size(-1)),
        count(dim == 0 ? 0 : x.numel() / dim),
        grain(std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(dim, 1))) {}
  std::int64_t dim;
  std::int64_t count;
  std::int64_t grain;
};

/// The kernels take null for a weight of ones, and for what is not added.
template <class T>
const T* pointer(const at::Tensor& tensor, std::int64_t element = 0) {
  return tensor.defined() ? in<T>(tensor) + element : nullptr;
}

/// As the kernels take it beside x: under autocast a gradient may come in another type.
at::Tensor dense(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() ? tensor.to(like.scalar_type()).contiguous() : tensor;
}

/// A weight is small: converting it costs nothing beside the rows.
at::Tensor float_weight(const at::Tensor& weight) {
  return weight.defined() ? weight.to(c10::ScalarType::Float).contiguous() : weight;
}

/// In the order of the row kernels: x * rstd, then the weight, one rounding at the end.
AddRmsNormResult composed(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                          double eps) {
  const at::Tensor sum = residual.defined() ? x.add(residual) : x;
  const at::Tensor v = sum.to(compute_type(x));
  const at::Tensor rstd = at::rsqrt(v.pow(2).mean(-1, true).add(eps));
  at::Tensor y = v * rstd;
  if (weight.defined()) {
    y = y * weight.to(v.scalar_type());
  }
  return {y.to(x.scalar_type()), sum, rstd};
}

/// With g the gradient times the weight: dx = rstd * (g - x * rstd^2 * mean(g * x)).
std::pair<at::Tensor, at::Tensor> composed_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad) {
  const at::Tensor v = x.to(rstd.scalar_type());
  const at::Tensor g = grad.to(rstd.scalar_type());
  const at::Tensor gw = weight.defined() ? g * weight.to(rstd.scalar_type()) : g;
  const at::Tensor pull = (gw * v).mean(-1, true) * rstd * rstd;
  at::Tensor x_grad = ((gw - v * pull) * rstd).to(x.scalar_type());
  if (sum_grad.defined()) {
    x_grad = x_grad.add(sum_grad.to(x.scalar_type()));
  }
  if (!weight.defined()) {
    return {x_grad, {}};
  }
  const at::Tensor terms = (g * v * rstd).reshape({-1, x.size(-1)});
  return {x_grad, terms.sum(0).to(weight.scalar_type())};
}

/// (..., 1), fp32, for x of (..., size).
at::Tensor empty_rstd(const at::Tensor& x) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(c10::ScalarType::Float));
}

/// The weight as the CUDA kernels take it: fp32, or of the type of x.
at::Tensor cuda_weight(const at::Tensor& weight, const at::Tensor& x) {
  return weight.defined() && weight.scalar_type() == x.scalar_type() ? weight.contiguous()
                                                                     : float_weight(weight);
}

/// The inputs of a call; `x` and `weight` are contiguous.
RmsNorm cuda_call(const at::Tensor& x, const at::Tensor& weight) {
  const Rows rows(x);
  return {.x = x.const_data_ptr(),
          .weight = weight.defined() ? weight.const_data_ptr() : nullptr,
          .weight_is_float = !weight.defined() || weight.scalar_type() == c10::ScalarType::Float,
          .rows = rows.count,
          .size = rows.dim};
}

/// x is dense, and so is the residual, if one is added.
void norm_on_cuda(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                  double eps, const AddRmsNormResult& result) {
  const at::Tensor scale = cuda_weight(weight, x);
  RmsNorm call = cuda_call(x, scale);
  call.eps = static_cast<float>(eps);
  call.out = result.out.mutable_data_ptr();
  call.rstd = out<float>(result.rstd);
  std::vector<at::Tensor> inputs{x};
  std::vector<at::Tensor> results{result.out};
  if (residual.defined()) {
    call.residual = residual.const_data_ptr();
    call.sum = result.sum.mutable_data_ptr();
    inputs.push_back(residual);
    results.push_back(result.sum);
  }
  run_cuda_kernel(call, residual.defined() ? "tessera::add_rms_norm" : "tessera::rms_norm", inputs,
                  results, x);
}

void norm_by_rows(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                  double eps, const AddRmsNormResult& result) {
  const at::Tensor scale = float_weight(weight);
  const Rows rows(x);
  with_row_kernels(x, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, rows.count, rows.grain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin * rows.dim;
      kernels.rms_norm(in<T>(x) + at, pointer<T>(residual, at), pointer<float>(scale),
                       residual.defined() ? out<T>(result.sum) + at : nullptr,
                       out<T>(result.out) + at, out<float>(result.rstd) + begin, end - begin,
                       rows.dim, static_cast<float>(eps));
    });
  });
}

/// The norm of x where the residual is undefined; then the sum is not of use.
AddRmsNormResult norm_of_sum(const at::Tensor& x, const at::Tensor& residual,
                             const at::Tensor& weight, double eps) {
  if (!has_kernels(x)) {
    return composed(x, residual, weight, eps);
  }
  const at::Tensor from = x.contiguous();
  AddRmsNormResult result{at::empty_like(from), residual.defined() ? at::empty_like(from) : from,
                          empty_rstd(x)};
  const at::Tensor added = dense(residual, x);
  has_cuda_kernels(x) ? norm_on_cuda(from, added, weight, eps, result)
                      : norm_by_rows(from, added, weight, eps, result);
  return result;
}

std::pair<at::Tensor, at::Tensor> backward_on_cuda(const at::Tensor& g, const at::Tensor& x,
                                                   const at::Tensor& weight, const at::Tensor& rstd,
                                                   const at::Tensor& sum_grad) {
  const at::Tensor scale = cuda_weight(weight, x);
  const at::Tensor of_rows = rstd.contiguous();
  const at::Tensor x_grad = at::empty(x.sizes(), x.options());
  RmsNormBackward call{.forward = cuda_call(x, scale),
                       .grad = g.const_data_ptr(),
                       .x_grad = x_grad.mutable_data_ptr()};
  // Backward only reads it.
  call.forward.rstd = const_cast<float*>(in<float>(of_rows));
  at::Tensor weight_grad;
  at::Tensor terms;
  if (weight.defined()) {
    const Rows rows(x);
    terms = at::empty({rms_norm_blocks(rows.count, rows.dim), rows.dim}, rstd.options());
    // Without rows there is no launch.
    weight_grad = rows.count == 0 ? at::zeros_like(scale) : at::empty_like(scale);
    call.weight_grad = weight_grad.mutable_data_ptr();
    call.terms = out<float>(terms);
  }
  std::vector<at::Tensor> inputs{g, x};
  if (sum_grad.defined()) {
    call.sum_grad = sum_grad.const_data_ptr();
    inputs.push_back(sum_grad);
  }
  run_cuda_kernel(call, "tessera::rms_norm_backward", inputs, {x_grad}, x_grad);
  return {x_grad, weight.defined() ? weight_grad.to(weight.scalar_type()) : weight_grad};
}

std::pair<at::Tensor, at::Tensor> backward_by_rows(const at::Tensor& g, const at::Tensor& x,
                                                   const at::Tensor& weight, const at::Tensor& rstd,
                                                   const at::Tensor& sum_grad) {
  const at::Tensor scale = float_weight(weight);
  const Rows rows(x);
  const at::Tensor x_grad = at::empty_like(x);
  // Each block adds to a separate row, so that threads never add to one place.
  const at::Tensor terms =
      weight.defined() ? at::zeros({kBlocks, rows.dim}, rstd.options()) : at::Tensor();
  // The last blocks may be short or empty.
  const std::int64_t block = (rows.count + kBlocks - 1) / kBlocks;
  with_row_kernels(x, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, kBlocks,
                 std::max<std::int64_t>(1, rows.grain / std::max<std::int64_t>(block, 1)),
                 [&](std::int64_t first, std::int64_t last) {
                   for (std::int64_t b = first; b < last; ++b) {
                     const std::int64_t row = std::min(b * block, rows.count);
                     const std::int64_t at = row * rows.dim;
                     kernels.rms_norm_backward(
                         in<T>(g) + at, pointer<T>(sum_grad, at), in<T>(x) + at,
                         pointer<float>(scale), in<float>(rstd) + row, out<T>(x_grad) + at,
                         terms.defined() ? out<float>(terms) + b * rows.dim : nullptr,
                         std::min(block, rows.count - row), rows.dim);
                   }
                 });
  });
  if (!weight.defined()) {
    return {x_grad, {}};
  }
  // 16 rows, which are summed in one order whatever the number of threads.
  return {x_grad, terms.sum(0).to(weight.scalar_type())};
}

}  // namespace

RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const AddRmsNormResult result = norm_of_sum(x, {}, weight, eps);
  return {result.out, result.rstd};
}

AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const at::Tensor& weight, double eps) {
  return norm_of_sum(x, residual, weight, eps);
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd) {
  return rms_norm_backward(grad, x, weight, rstd, /*sum_grad=*/{});
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad) {
  if (!has_kernels(x)) {
    return composed_backward(grad, x, weight, rstd, sum_grad);
  }
  const at::Tensor g = dense(grad, x);
  const at::Tensor sum_g = dense(sum_grad, x);
  return has_cuda_kernels(x) ? backward_on_cuda(g, x.contiguous(), weight, rstd, sum_g)
                             : backward_by_rows(g, x.contiguous(), weight, rstd, sum_g);
}

}  // namespace tessera::kernels

// The kernels behind scaled_dot_product_attention, which itself returns no log-sum-exp. Each has
// that in another form, and takes it back in the same one.

#include "fused/attention_part.h"
#include "tessera/core/detail/rounding.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace tessera::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double scale_of(const at::Tensor& q) {
  return 1 / std::sqrt(static_cast<double>(q.size(-1)));
}

/// With zeros behind the last dimension, to a multiple of `multiple`.
at::Tensor padded_to(const at::Tensor& tensor, std::int64_t multiple, double value = 0) {
  const std::int64_t missing = detail::round_up(tensor.size(-1), multiple) - tensor.size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing}, value);
}

/// The first elements of each row, where there are more.
at::Tensor cut(const at::Tensor& tensor, std::int64_t width) {
  return tensor.size(-1) == width ? tensor : tensor.narrow(-1, 0, width);
}

/// Scores have the type in which half types are summed.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

/// As GPU kernels read a mask: of all heads, rows 16 elements aligned.
std::optional<at::Tensor> aligned_mask(const at::Tensor& mask, const at::Tensor& q) {
  if (!mask.defined()) {
    return std::nullopt;
  }
  return cut(padded_to(mask, 16), mask.size(-1))
      .expand({q.size(0), q.size(1), mask.size(0), mask.size(1)});
}

// By formula, for what no kernel takes.

at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, const SeenKeys& seen) {
  at::Tensor scores = widened(q).matmul(widened(k).transpose(2, 3)).mul_(scale_of(q));
  if (seen.causal) {
    scores.masked_fill_(at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu_(1),
                        -kInfinity);
  }
  return seen.mask.defined() ? scores.add_(seen.mask) : scores;
}

AttentionPart by_formula(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const SeenKeys& seen) {
  const at::Tensor scores = scores_of(q, k, seen);
  at::Tensor log_sum_exp = scores.logsumexp(-1);
  const at::Tensor weights = scores.sub(log_sum_exp.unsqueeze(-1)).exp_();
  return {weights.matmul(widened(v)).to(q.scalar_type()), std::move(log_sum_exp)};
}

AttentionGradients by_formula_backward(const at::Tensor& grad, const at::Tensor& q,
                                       const at::Tensor& k, const at::Tensor& v,
                                       const AttentionPart& whole, const SeenKeys& seen) {
  const at::Tensor weights = scores_of(q, k, seen).sub_(whole.log_sum_exp.unsqueeze(-1)).exp_();
  const at::Tensor of_out = widened(grad);
  const at::Tensor mean = of_out.mul(whole.out).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores =
      of_out.matmul(widened(v).transpose(2, 3)).sub_(mean).mul_(weights).mul_(scale_of(q));
  const auto type = q.scalar_type();
  return {of_scores.matmul(widened(k)).to(type),
          of_scores.transpose(2, 3).matmul(widened(q)).to(type),
          weights.transpose(2, 3).matmul(of_out).to(type)};
}

// Flash: the CPU's kernel takes a mask, the GPU's a width that is a multiple of 8.

bool is_on_host(const at::Tensor& q) {
  return q.is_cpu() || q.is_meta();
}

AttentionPart by_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const SeenKeys& seen) {
  if (is_on_host(q)) {
    auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0, seen.causal, optional_mask(seen.mask));
    return {std::move(out), std::move(log_sum_exp)};
  }
  auto results = at::_scaled_dot_product_flash_attention(
      padded_to(q, 8), padded_to(k, 8), padded_to(v, 8), 0, seen.causal, false, scale_of(q));
  return {cut(std::get<0>(results), v.size(-1)), std::get<1>(results)};
}

AttentionGradients by_flash_backward(const at::Tensor& grad, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const AttentionPart& whole, const SeenKeys& seen) {
  if (is_on_host(q)) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, whole.out, whole.log_sum_exp, 0, seen.causal, optional_mask(seen.mask));
  }
  // Nothing is dropped, so that no state of a generator is read.
  const auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_backward(
      padded_to(grad, 8), padded_to(q, 8), padded_to(k, 8), padded_to(v, 8),
      padded_to(whole.out, 8), whole.log_sum_exp, {}, {}, q.size(2), k.size(2), 0, seen.causal, {},
      {}, scale_of(q));
  return {cut(of_q, q.size(-1)), cut(of_k, k.size(-1)), cut(of_v, v.size(-1))};
}

// Efficient: the log-sum-exp has rows of a multiple of 32 queries.

AttentionPart by_efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_efficient_attention(
      q, k, v, aligned_mask(seen.mask, q), /*compute_log_sumexp=*/true, 0, seen.causal);
  return {std::get<0>(results), cut(std::get<1>(results), q.size(2))};
}

AttentionGradients by_efficient_backward(const at::Tensor& grad, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const AttentionPart& whole, const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_efficient_attention_backward(
      grad, q, k, v, aligned_mask(seen.mask, q).value_or(at::Tensor()), whole.out,
      padded_to(whole.log_sum_exp, 32, kInfinity), {}, {}, 0, {true, true, true, false},
      seen.causal);
  return {std::get<0>(results), std::get<1>(results), std::get<2>(results)};
}

// cuDNN: libtorch's releases differ in whether the log-sum-exp has a last dimension of 1.

std::atomic<bool>& has_column() {
  static std::atomic<bool> of_this_libtorch{true};
  return of_this_libtorch;
}

AttentionPart by_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_cudnn_attention(
      q, k, v, aligned_mask(seen.mask, q), /*compute_log_sumexp=*/true, 0, seen.causal);
  const at::Tensor& log_sum_exp = std::get<1>(results);
  has_column() = log_sum_exp.dim() == 4;
  return {std::get<0>(results), has_column() ? log_sum_exp.squeeze(-1) : log_sum_exp};
}

AttentionGradients by_cudnn_backward(const at::Tensor& grad, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const AttentionPart& whole, const SeenKeys& seen) {
  return at::_scaled_dot_product_cudnn_attention_backward(
      grad, q, k, v, whole.out, has_column() ? whole.log_sum_exp.unsqueeze(-1) : whole.log_sum_exp,
      {}, {}, aligned_mask(seen.mask, q).value_or(at::Tensor()), {}, {}, q.size(2), k.size(2), 0,
      seen.causal);
}

struct Calls {
  AttentionPart (*forward)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const SeenKeys&);
  AttentionGradients (*backward)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const AttentionPart&, const SeenKeys&);
};

Calls calls_of(at::SDPBackend backend) {
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return {&by_flash, &by_flash_backward};
    case at::SDPBackend::efficient_attention:
      return {&by_efficient, &by_efficient_backward};
    case at::SDPBackend::cudnn_attention:
      return {&by_cudnn, &by_cudnn_backward};
    default:
      return {&by_formula, &by_formula_backward};
  }
}

/// The gradient of kv, by that of repeat_heads(kv).
at::Tensor sum_heads(const at::Tensor& grad, std::int64_t kv_heads) {
  return grad.unflatten(1, {kv_heads, grad.size(1) / kv_heads}).sum(2);
}

}  // namespace

AttentionKernel kernel_of_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SeenKeys& seen) {
  if (q.is_meta()) {
    return {at::SDPBackend::flash_attention, false};
  }
  AttentionKernel kernel = choose_attention(q, k, v, backend_of_libtorch(seen.causal, seen.mask));
  const bool has_kernel = kernel.backend == at::SDPBackend::flash_attention ||
                          kernel.backend == at::SDPBackend::efficient_attention ||
                          kernel.backend == at::SDPBackend::cudnn_attention;
  kernel.repeats_heads |= !has_kernel && q.size(1) != k.size(1);
  return kernel;
}

AttentionPart attention_part(const AttentionKernel& kernel, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen) {
  const Calls calls = calls_of(kernel.backend);
  if (!kernel.repeats_heads) {
    return calls.forward(q, k, v, seen);
  }
  const std::int64_t heads = q.size(1);
  return calls.forward(q, repeat_heads(k, heads), repeat_heads(v, heads), seen);
}

AttentionGradients attention_part_backward(const AttentionKernel& kernel, const at::Tensor& grad,
                                           const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionPart& whole,
                                           const SeenKeys& seen) {
  const Calls calls = calls_of(kernel.backend);
  // Kernels read it as they write it.
  const AttentionPart given{whole.out, whole.log_sum_exp.contiguous()};
  if (!kernel.repeats_heads) {
    return calls.backward(grad, q, k, v, given, seen);
  }
  const std::int64_t heads = q.size(1), kv_heads = k.size(1);
  const auto [of_q, of_k, of_v] =
      calls.backward(grad, q, repeat_heads(k, heads), repeat_heads(v, heads), given, seen);
  return {of_q, sum_heads(of_k, kv_heads), sum_heads(of_v, kv_heads)};
}

void merge(AttentionPart& merged, const AttentionPart& part) {
  at::Tensor log_sum_exp = at::logaddexp(merged.log_sum_exp, part.log_sum_exp);
  const auto share = [&](const at::Tensor& own) {
    return own.sub(log_sum_exp).exp_().unsqueeze(-1);
  };
  merged.out =
      merged.out.mul(share(merged.log_sum_exp)).addcmul_(part.out, share(part.log_sum_exp));
  merged.log_sum_exp = std::move(log_sum_exp);
}

}  // namespace tessera::detail

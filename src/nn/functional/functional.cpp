// The functions that are operators of the library: what they do is in src/dtensor/fused/.

#include "tessera/nn/functional.h"

#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn {
namespace {

/// Keys are the callers', who may use one twice.
RandomKey next_id() {
  thread_local std::uint64_t calls = 0;
  return {stream_of("nn::dropout"), replayed_count(calls)};
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return tessera::detail::rms_norm(x, weight, eps);
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps) {
  return tessera::detail::add_rms_norm(x, residual, weight, eps);
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  return tessera::detail::silu_mul(gate, up);
}

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return tessera::detail::rotary_embedding(x, cos, sin);
}

std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin) {
  return tessera::detail::rotary_embedding(q, k, cos, sin);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  return tessera::detail::embedding(weight, indices);
}

/// The rows of the batch are the forward's to know; the operator sees the layout of x alone.
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key) {
  const auto place = tessera::detail::random_place({"dropout", x, x, next_id()});
  return tessera::detail::dropout(x, p, key, place.elements.first_element);
}

}  // namespace tessera::nn

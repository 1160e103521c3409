// The gate of SwiGLU. Elementwise, so that rows do not matter: threads share the elements.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "fused_dispatch.h"
#include "parallel.h"
#include "tessera/kernels/fused.h"

namespace tessera::kernels {
namespace {

/// Elements that are worth a thread.
constexpr std::int64_t kSiluGrain = 16384;  // a multiple of the vector width

/// silu'(g) = s * (1 + g * (1 - s)) with s = sigmoid(g). silu is not kept from the forward: to
/// recompute it is cheaper than to read it.
std::pair<at::Tensor, at::Tensor> composed_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up) {
  const c10::ScalarType type = compute_type(gate);
  const at::Tensor g = gate.to(type);
  const at::Tensor d = grad.to(type);
  const at::Tensor sigmoid = at::sigmoid(g);
  const at::Tensor slope = sigmoid * (1 + g * (1 - sigmoid));
  return {(d * up.to(type) * slope).to(gate.scalar_type()), (d * g * sigmoid).to(up.scalar_type())};
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  if (!has_row_kernels(gate)) {
    const c10::ScalarType type = compute_type(gate);
    return (at::silu(gate.to(type)) * up.to(type)).to(gate.scalar_type());
  }
  const at::Tensor a = gate.contiguous();
  const at::Tensor b = up.contiguous();
  at::Tensor result = at::empty_like(a);
  with_row_kernels(gate, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, a.numel(), kSiluGrain, [&](std::int64_t begin, std::int64_t end) {
      kernels.silu_mul(in<T>(a) + begin, in<T>(b) + begin, out<T>(result) + begin, end - begin);
    });
  });
  return result;
}

std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up) {
  if (!has_row_kernels(gate)) {
    return composed_backward(grad, gate, up);
  }
  // A gradient may come in another type under autocast.
  const at::Tensor g = grad.to(gate.scalar_type()).contiguous();
  const at::Tensor a = gate.contiguous();
  const at::Tensor b = up.contiguous();
  // `up` has the type and sizes of `gate`, so that one type of kernel serves both.
  const at::Tensor a_grad = at::empty_like(a);
  const at::Tensor b_grad = at::empty_like(a);
  with_row_kernels(gate, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, a.numel(), kSiluGrain, [&](std::int64_t begin, std::int64_t end) {
      kernels.silu_mul_backward(in<T>(g) + begin, in<T>(a) + begin, in<T>(b) + begin,
                                out<T>(a_grad) + begin, out<T>(b_grad) + begin, end - begin);
    });
  });
  return {a_grad, b_grad};
}

}  // namespace tessera::kernels

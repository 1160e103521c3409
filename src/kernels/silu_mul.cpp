// The gate of SwiGLU. Elementwise, so that rows do not matter: threads share the elements.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "device/silu_mul.h"
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

/// How far the rows of x are apart, if that is one number and their elements are consecutive; 0
/// otherwise.
std::int64_t row_stride(const at::Tensor& x) {
  if (x.dim() < 2 || x.stride(-1) != 1) {
    return 0;
  }
  for (std::int64_t d = x.dim() - 2; d > 0; --d) {
    if (x.stride(d - 1) != x.stride(d) * x.size(d)) {
      return 0;
    }
  }
  return x.stride(-2);
}

/// The inputs as the CUDA kernels take them: parts of one product without a copy.
struct CudaInputs {
  CudaInputs(const at::Tensor& gate_in, const at::Tensor& up_in)
      : gate(gate_in), up(up_in), rows_apart(row_stride(gate) > 0 && row_stride(up) > 0) {
    // Dense inputs are one row, however many they have.
    rows_apart = rows_apart && !(gate.is_contiguous() && up.is_contiguous());
    if (!rows_apart) {
      gate = gate.contiguous();
      up = up.contiguous();
    }
  }

  SiluMul call() const {
    const std::int64_t size = rows_apart ? gate.size(-1) : gate.numel();
    return {.gate = gate.const_data_ptr(),
            .up = up.const_data_ptr(),
            .gate_stride = rows_apart ? row_stride(gate) : 0,
            .up_stride = rows_apart ? row_stride(up) : 0,
            .rows = size == 0 ? 0 : gate.numel() / size,
            .size = size};
  }

  at::Tensor gate;
  at::Tensor up;
  bool rows_apart;
};

at::Tensor silu_mul_on_cuda(const at::Tensor& gate, const at::Tensor& up) {
  const CudaInputs inputs(gate, up);
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  SiluMul call = inputs.call();
  call.out = result.mutable_data_ptr();
  run_cuda_kernel(&CudaKernels::silu_mul, call, "tessera::silu_mul", {gate, up}, {result});
  return result;
}

std::pair<at::Tensor, at::Tensor> silu_mul_backward_on_cuda(const at::Tensor& grad,
                                                            const at::Tensor& gate,
                                                            const at::Tensor& up) {
  const CudaInputs inputs(gate, up);
  // A gradient may come in another type under autocast.
  const at::Tensor g = grad.to(gate.scalar_type()).contiguous();
  const at::Tensor gate_grad = at::empty(gate.sizes(), gate.options());
  const at::Tensor up_grad = at::empty(gate.sizes(), gate.options());
  run_cuda_kernel(&CudaKernels::silu_mul_backward,
                  {.forward = inputs.call(),
                   .grad = g.const_data_ptr(),
                   .gate_grad = gate_grad.mutable_data_ptr(),
                   .up_grad = up_grad.mutable_data_ptr()},
                  "tessera::silu_mul_backward", {g, gate, up}, {gate_grad, up_grad});
  return {gate_grad, up_grad};
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  if (has_cuda_kernels(gate)) {
    return silu_mul_on_cuda(gate, up);
  }
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
  if (has_cuda_kernels(gate)) {
    return silu_mul_backward_on_cuda(grad, gate, up);
  }
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

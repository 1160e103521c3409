// The gate of SwiGLU. Elementwise: threads share the elements, and rows are for inputs that are
// parts of one product.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

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

/// The tensors as the kernels take them: parts of one product without a copy.
struct GateRows {
  GateRows(const at::Tensor& gate_in, const at::Tensor& up_in)
      : gate(gate_in), up(up_in), apart(row_stride(gate) > 0 && row_stride(up) > 0) {
    // Dense inputs are one row, however many they have.
    apart = apart && !(gate.is_contiguous() && up.is_contiguous());
    if (!apart) {
      gate = gate.contiguous();
      up = up.contiguous();
    }
  }

  std::int64_t stride_of(const at::Tensor& x) const { return apart ? row_stride(x) : 0; }

  SiluMul call(const at::Tensor& result) const {
    const std::int64_t size = apart ? gate.size(-1) : gate.numel();
    return {.gate = gate.const_data_ptr(),
            .up = up.const_data_ptr(),
            .gate_stride = stride_of(gate),
            .up_stride = stride_of(up),
            .rows = size == 0 ? 0 : gate.numel() / size,
            .size = size,
            .out = result.defined() ? result.mutable_data_ptr() : nullptr};
  }

  at::Tensor gate;
  at::Tensor up;
  bool apart;
};

/// Calls run(row, first, count) for ranges of the rows' elements, in parallel.
template <class Run>
void for_each_range(const SiluMul& call, Run&& run) {
  parallel_for(0, call.rows * call.size, kSiluGrain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t first = begin % call.size;
      const std::int64_t count = std::min(end - begin, call.size - first);
      run(begin / call.size, first, count);
      begin += count;
    }
  });
}

template <class T>
void on_host(const RowKernels<T>& kernels, const SiluMul& p) {
  for_each_range(p, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
    kernels.silu_mul(static_cast<const T*>(p.gate) + row * p.gate_stride + first,
                     static_cast<const T*>(p.up) + row * p.up_stride + first,
                     static_cast<T*>(p.out) + row * p.size + first, count);
  });
}

template <class T>
void on_host(const RowKernels<T>& kernels, const SiluMulBackward& p) {
  const SiluMul& in = p.forward;
  for_each_range(in, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
    kernels.silu_mul_backward(
        static_cast<const T*>(p.grad) + row * in.size + first,
        static_cast<const T*>(in.gate) + row * in.gate_stride + first,
        static_cast<const T*>(in.up) + row * in.up_stride + first,
        static_cast<T*>(p.gate_grad) + row * p.gate_grad_stride + first,
        static_cast<T*>(p.up_grad) + row * p.up_grad_stride + first,
        in.out != nullptr ? static_cast<T*>(in.out) + row * in.size + first : nullptr, count);
  });
}

/// The tensors of an operator, for the observer of a FakeMode.
struct Observed {
  const char* name;
  std::initializer_list<at::Tensor> inputs;
};

void run_forward(const GateRows& rows, const at::Tensor& result, const Observed& observed) {
  const SiluMul call = rows.call(result);
  if (has_cuda_kernels(result)) {
    return run_cuda_kernel(call, observed.name, observed.inputs, {result});
  }
  with_row_kernels(result, [&](const auto& kernels, auto) { on_host(kernels, call); });
}

/// `product`: undefined, or what gets the forward's result again. `gradients`: the operator's other
/// results.
void run_backward(const at::Tensor& grad, const GateRows& rows, const at::Tensor& gate_grad,
                  const at::Tensor& up_grad, const at::Tensor& product, const Observed& observed,
                  at::TensorList gradients) {
  const SiluMulBackward call{.forward = rows.call(product),
                             .grad = grad.const_data_ptr(),
                             .gate_grad = gate_grad.mutable_data_ptr(),
                             .up_grad = up_grad.mutable_data_ptr(),
                             .gate_grad_stride = rows.stride_of(gate_grad),
                             .up_grad_stride = rows.stride_of(up_grad)};
  if (has_cuda_kernels(grad)) {
    std::vector<at::Tensor> results = gradients.vec();
    if (product.defined()) {
      results.insert(results.begin(), product);
    }
    return run_cuda_kernel(call, observed.name, observed.inputs, results, results.front());
  }
  with_row_kernels(grad, [&](const auto& kernels, auto) { on_host(kernels, call); });
}

/// The gradients of gate and up; `product` as in run_backward().
std::pair<at::Tensor, at::Tensor> gradients_of(const at::Tensor& grad, const at::Tensor& gate,
                                               const at::Tensor& up, const at::Tensor& product,
                                               const char* name) {
  // A gradient may come in another type under autocast.
  const at::Tensor g = grad.to(gate.scalar_type()).contiguous();
  // `up` has the type and sizes of `gate`, so that one type of kernel serves both.
  const at::Tensor gate_grad = at::empty(gate.sizes(), gate.options());
  const at::Tensor up_grad = at::empty(gate.sizes(), gate.options());
  run_backward(g, {gate, up}, gate_grad, up_grad, product, {name, {g, gate, up}},
               {gate_grad, up_grad});
  return {gate_grad, up_grad};
}

at::Tensor composed(const at::Tensor& gate, const at::Tensor& up) {
  const c10::ScalarType type = compute_type(gate);
  return (at::silu(gate.to(type)) * up.to(type)).to(gate.scalar_type());
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  if (!has_kernels(gate)) {
    return composed(gate, up);
  }
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  run_forward({gate, up}, result, {"tessera::silu_mul", {gate, up}});
  return result;
}

std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up) {
  if (!has_kernels(gate)) {
    return composed_backward(grad, gate, up);
  }
  return gradients_of(grad, gate, up, {}, "tessera::silu_mul_backward");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> silu_mul_with_gradients(const at::Tensor& grad,
                                                                       const at::Tensor& gate,
                                                                       const at::Tensor& up) {
  if (!has_kernels(gate)) {
    auto [gate_grad, up_grad] = composed_backward(grad, gate, up);
    return {composed(gate, up), gate_grad, up_grad};
  }
  const at::Tensor product = at::empty(gate.sizes(), gate.options());
  const auto [gate_grad, up_grad] =
      gradients_of(grad, gate, up, product, "tessera::silu_mul_with_gradients");
  return {product, gate_grad, up_grad};
}

}  // namespace tessera::kernels

// Which of three ways a fused operation takes: the row kernels (fp32 and bf16 on a CPU), the CUDA
// kernels (also fp16), or a composition of ATen operators. All compute the same formula; the
// kernels read memory once.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <vector>

#include "cuda_kernels.h"
#include "fake/fake_operators.h"
#include "rows/row_kernels.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

/// Whether the CUDA kernels take tensors of this device and type.
inline bool has_cuda_kernels(const at::Tensor& x) {
  // A plan for a GPU allocates what the kernels do there.
  return (x.is_cuda() || (x.is_cpu() && fake_device() == c10::DeviceType::CUDA)) &&
         (x.scalar_type() == c10::ScalarType::Float ||
          x.scalar_type() == c10::ScalarType::BFloat16 || x.scalar_type() == c10::ScalarType::Half);
}

/// Runs a call of the CUDA kernels, or in a FakeMode tells its observer: `name` and the tensors of
/// the operator. The kernel is chosen by the device and type of `like`. Does nothing if that has no
/// elements: a grid of no blocks is an error.
template <class Call>
void run_cuda_kernel(const Call& call, const char* name, at::TensorList inputs,
                     at::TensorList results, const at::Tensor& like) {
  if (in_fake_mode()) {
    const std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
    observe_fake_call({name, arguments, inputs.vec(), results.vec()});
  } else if (like.numel() > 0) {
    launch_cuda(call, like);
  }
}

/// The same, with the kernels of the first result's type.
template <class Call>
void run_cuda_kernel(const Call& call, const char* name, std::initializer_list<at::Tensor> inputs,
                     std::initializer_list<at::Tensor> results) {
  run_cuda_kernel(call, name, at::TensorList(inputs), at::TensorList(results), *results.begin());
}

/// Whether the row kernels take tensors of this device and type.
inline bool has_row_kernels(const at::Tensor& x) {
  return x.is_cpu() && fake_device() == c10::DeviceType::CPU &&
         (x.scalar_type() == c10::ScalarType::Float ||
          x.scalar_type() == c10::ScalarType::BFloat16);
}

inline bool has_kernels(const at::Tensor& x) {
  return has_row_kernels(x) || has_cuda_kernels(x);
}

/// Calls body(kernels, element) with the row kernels for x's type, and a value of their element
/// type. In a FakeMode it does nothing.
/// The lambda is compiled once for each of the two types.
template <class Body>
void with_row_kernels(const at::Tensor& x, Body&& body) {
  if (in_fake_mode()) {
    return;
  }
  if (x.scalar_type() == c10::ScalarType::Float) {
    body(row_kernels().fp32, float{});
  } else {
    body(row_kernels().bf16, Bf16{});
  }
}

/// data_ptr<T>() checks the scalar type, and Bf16 is only the bits of a bfloat16: hence the cast.
template <class T>
const T* in(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <class T>
T* out(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

/// The type that ATen's formulas compute in: half precision is computed in fp32 and rounded once,
/// as the row kernels do. Throws Error for numbers that are not real.
inline c10::ScalarType compute_type(const at::Tensor& x) {
  TESSERA_CHECK(x.is_floating_point(),
                "an operator of floating-point numbers was given a tensor of ", x.scalar_type(),
                "; convert it, or write the formula with at:: operators");
  return x.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double
                                                    : c10::ScalarType::Float;
}

}  // namespace tessera::kernels

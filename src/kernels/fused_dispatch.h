// Selects the implementation of a fused operation: row kernels (CPU: fp32, bf16), CUDA kernels
// (fp32, bf16, fp16), or ATen operators. All implementations compute the same formula.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda_kernels.h"
#include "rows/row_kernels.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

/// Whether the CUDA kernels support the tensor's device and type.
inline bool has_cuda_kernels(const at::Tensor& x) {
  // runs_on_cuda() is also true on a CPU if a FakeMode simulates a GPU and its memory use.
  return runs_on_cuda(x) &&
         (x.scalar_type() == c10::ScalarType::Float ||
          x.scalar_type() == c10::ScalarType::BFloat16 || x.scalar_type() == c10::ScalarType::Half);
}

/// Runs a CUDA kernel on the device and with the dtype of `like`. In a FakeMode, only reports
/// operator `name` and its tensors to the observer. Does nothing if `like` is empty.
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

/// Calls run_cuda_kernel() with the first result as the argument `like`.
template <class Call>
void run_cuda_kernel(const Call& call, const char* name, std::initializer_list<at::Tensor> inputs,
                     std::initializer_list<at::Tensor> results) {
  run_cuda_kernel(call, name, at::TensorList(inputs), at::TensorList(results), *results.begin());
}

/// Whether the row kernels support the tensor's device and type.
inline bool has_row_kernels(const at::Tensor& x) {
  return x.is_cpu() && fake_device() == c10::DeviceType::CPU &&
         (x.scalar_type() == c10::ScalarType::Float ||
          x.scalar_type() == c10::ScalarType::BFloat16);
}

inline bool has_kernels(const at::Tensor& x) {
  return has_row_kernels(x) || has_cuda_kernels(x);
}

/// Calls body(kernels, element) with the row kernels for the type of `x`, fp32 or bf16. `element`
/// is a value of that type. Does nothing in a FakeMode.
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

/// Runs at::parallel_for: calls body(begin, end) for parts of the range with at least `grain`
/// elements. Not inline, because only parallel.cpp is compiled with OpenMP.
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t, std::int64_t)> body);

/// Returns the address of the data of `x` as T. T can be Bf16, this library's own bfloat16 class,
/// which data_ptr<T>() would refuse.
template <class T>
const T* in(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <class T>
T* out(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

/// Returns the type in which ATen operators compute a formula: fp32 for half precision. Throws
/// Error for types that are not floating point.
inline c10::ScalarType compute_type(const at::Tensor& x) {
  TESSERA_CHECK(x.is_floating_point(),
                "an operator for floating-point tensors was given a tensor of ", x.scalar_type(),
                "; convert the tensor, or write the formula with at:: operators");
  return x.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double
                                                    : c10::ScalarType::Float;
}

}  // namespace tessera::kernels

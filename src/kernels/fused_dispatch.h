#pragma once

#include <ATen/core/Tensor.h>

#include "row_kernels.h"

namespace tessera::kernels {

/// Whether the row kernels take tensors of this device and type.
inline bool has_row_kernels(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == c10::ScalarType::Float ||
                        x.scalar_type() == c10::ScalarType::BFloat16);
}

/// body(kernels, element) with the row kernels for x's type and a value of the type they work on.
template <class Body>
void with_row_kernels(const at::Tensor& x, Body&& body) {
  if (x.scalar_type() == c10::ScalarType::Float) {
    body(row_kernels().fp32, float{});
  } else {
    body(row_kernels().bf16, Bf16{});
  }
}

template <class T>
const T* in(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <class T>
T* out(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

/// The type that ATen's formulas compute in.
inline c10::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double
                                                    : c10::ScalarType::Float;
}

}  // namespace tessera::kernels

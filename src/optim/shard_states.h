#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::optim {

/// The type in which a tensor of type `dtype` is updated: fp32 where it is narrower.
c10::ScalarType update_type(c10::ScalarType dtype);

/// Zeros of the sizes and on the devices of `tensors`, in the types they are updated in. Those of
/// one type and device lie one after another in one buffer.
std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors);
/// The same for 0-d fp32 counters.
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors);

/// `state`, of the sizes of the local part of `parameter`, as a tensor that lies as that does.
at::Tensor lying_as(const at::Tensor& parameter, const at::Tensor& state);

}  // namespace tessera::optim

#pragma once

#include <functional>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Called with gradients; some may be undefined.
using GradientHook = std::function<void(nn::TensorList gradients)>;

/// Calls `callback` with the gradients of `tensors` once all have been computed, which is when
/// backward has passed through everything that was computed from them. Replaces the tensors by
/// views behind a new autograd node, which autograd refuses to change in place. Does nothing if
/// none requires a gradient.
void call_after_backward(nn::TensorList tensors, GradientHook callback);

/// Calls `callback` when backward reaches any of `tensors` (once for each). Returns false if none
/// requires a gradient.
bool call_before_backward(nn::TensorList tensors, const std::function<void()>& callback);

}  // namespace tessera::fsdp

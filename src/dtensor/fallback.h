#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::detail {

/// Runs an operator whose arguments are on the stack, some of them distributed; its results replace
/// them. What every operator on DispatchKey::Fake comes to. Collective if inputs must be moved.
void dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace tessera::detail

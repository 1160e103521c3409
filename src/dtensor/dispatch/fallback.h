#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "dispatch/call_cache.h"

namespace tessera::detail {

/// Runs an operator whose arguments are on the stack, some of them distributed; its results replace
/// them. Every operator on kDistributedKey ends up here. Collective if inputs must be moved.
void dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// The same for a call that was looked up already. No operator mode sees it.
void dispatch(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack,
              CallCache::Lookup lookup);

}  // namespace tessera::detail

// Bernoulli numbers for which libtorch has kernels that draw one after another: each with a
// probability of its own, and in a new tensor. For distributed tensors they are composed of
// operators that draw by the element. plain_random.cpp does the same for plain ones.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <ATen/ops/empty_like.h>

#include "dispatch/fallback.h"
#include "overrides/composite_kernels.h"
#include "random/fills.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera::detail {
namespace {

using torch::jit::Stack;

/// Both operators take the tensor, the probability and the generator.
constexpr std::size_t kArguments = 3;

/// A generator that the caller passes is used directly, on whole tensors.
bool draws_by_element(const Stack& stack) {
  return tessera::is_distributed(torch::jit::peek(stack, 0, kArguments).toTensor()) &&
         torch::jit::peek(stack, 2, kArguments).isNone();
}

void put(Stack& stack, at::Tensor result) {
  torch::jit::drop(stack, kArguments);
  stack.emplace_back(std::move(result));
}

void bernoulli_of_each(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!draws_by_element(*stack)) {
    return dispatch(op, *stack);
  }
  const at::Tensor self = torch::jit::peek(*stack, 0, kArguments).toTensor();
  const at::Tensor p = torch::jit::peek(*stack, 1, kArguments).toTensor();
  check_mixing("aten::bernoulli_.Tensor", {self, p});
  const at::Tensor uniform = at::empty_like(self, self.options().dtype(at::kDouble)).uniform_();
  put(*stack, self.copy_(uniform.lt(p)));
}

void bernoulli_of_number(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!draws_by_element(*stack)) {
    return dispatch(op, *stack);
  }
  const at::Tensor self = torch::jit::peek(*stack, 0, kArguments).toTensor();
  const double p = torch::jit::peek(*stack, 1, kArguments).toDouble();
  const RandomSourceScope scope(self);
  put(*stack, at::empty_like(self).bernoulli_(p));
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  library.impl("bernoulli_.Tensor",
               torch::CppFunction::makeFromBoxedFunction<&bernoulli_of_each>());
  library.impl("bernoulli.p", torch::CppFunction::makeFromBoxedFunction<&bernoulli_of_number>());
}

}  // namespace
}  // namespace tessera::detail

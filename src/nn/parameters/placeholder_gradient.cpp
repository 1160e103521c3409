// Placeholders are on a dispatch key that libtorch keeps for wrappers which it does not know itself
// and to which it gives no kernels: a fallback for all operators on it sees them, and no other
// tensor.

#include "tessera/nn/detail/placeholder_gradient.h"

#include <torch/library.h>

#include "tessera/core/error.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::nn {
namespace {

/// Lists too: the foreach optimizers pass all gradients in one.
void refuse_placeholders(const c10::IValue& value) {
  if (value.isTensor()) {
    if (const PlaceholderGradient* found = placeholder(value.toTensor())) {
      found->refuse();
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      refuse_placeholders(element);
    }
  }
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  if (count > 0 && torch::jit::peek(*stack, 0, count).isTensor()) {
    const at::Tensor first = torch::jit::peek(*stack, 0, count).toTensor();
    PlaceholderGradient* found = placeholder(first);
    if (found != nullptr && found->run(op, *stack)) {
      return;
    }
  }
  for (const c10::IValue& value : *stack) {
    refuse_placeholders(value);
  }
  // Reached only if a program uses the key itself.
  fail(op.schema().name(), " met a tensor on a dispatch key of libtorch's own tests");
}

}  // namespace

bool PlaceholderGradient::run(const c10::OperatorHandle&, torch::jit::Stack&) {
  return false;
}

PlaceholderGradient* placeholder(const at::Tensor& gradient) {
  return tessera::detail::impl_cast<PlaceholderGradient>(gradient);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PLACEHOLDER_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

}  // namespace tessera::nn

#pragma once

// Calls of libtorch's operators with arguments that their schemas allow.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

namespace tessera::sweep {

using torch::jit::Stack;

/// A call that libtorch computes, and what it finds.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Stack results;
};

/// Up to two of each operator.
std::vector<Call> calls();

Stack run(const c10::OperatorHandle& op, Stack stack);

/// Doubles in (0, 1).
at::Tensor positive(at::IntArrayRef sizes);

/// `stack` with each tensor replaced.
template <class Replace>
Stack with_tensors(const Stack& stack, Replace replace) {
  Stack replaced;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      replaced.emplace_back(replace(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(replace(tensor));
      }
      replaced.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(replace(*tensor));
      }
      replaced.emplace_back(list);
    } else {
      replaced.push_back(value);
    }
  }
  return replaced;
}

}  // namespace tessera::sweep

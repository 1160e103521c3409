// The trap for optimizers that still hold a parameter which fully_shard or to_empty has replaced.
// They would train values that nobody reads, without an error; instead their gradient is a tensor
// of which every operator throws.

#include "tessera/nn/detail/retired_parameter.h"

#include <torch/library.h>

#include <utility>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

/// libtorch keeps this key for wrappers that it does not know itself and gives it no kernels.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

class RetiredGradient : public c10::TensorImpl {
 public:
  RetiredGradient(const at::Tensor& parameter, std::string by)
      : TensorImpl(c10::DispatchKeySet(kKey), parameter.dtype(), parameter.device()),
        by_(std::move(by)) {
    // For the message, which tells them.
    set_sizes_contiguous(parameter.sizes());
  }

  // What Tensor::data() does, with which some optimizers begin.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&,
                                                         bool) const override {
    refuse();
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&,
                                                         bool) const override {
    refuse();
  }

  [[noreturn]] void refuse() const {
    fail("an optimizer, or a backward, was to use a parameter of sizes ", sizes_default(), " that ",
         by_, " has replaced since; make torch::optim optimizers after ", by_,
         ", or use a tessera::optim one, which follows its parameters");
  }

 private:
  std::string by_;
};

/// Lists too: the foreach optimizers pass all gradients in one.
void refuse_retired(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto* impl = dynamic_cast<const RetiredGradient*>(value.toTensor().unsafeGetTensorImpl());
    if (impl != nullptr) {
      impl->refuse();
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      refuse_retired(element);
    }
  }
}

void refuse_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const c10::IValue& value : *stack) {
    refuse_retired(value);
  }
  // Reached only if a program uses the key itself.
  fail(op.schema().name(), " met a tensor on a dispatch key of libtorch's own tests");
}

}  // namespace

void retire_parameter(const at::Tensor& replaced, const std::string& by) {
  // No optimizer holds it.
  if (!replaced.requires_grad() || !replaced.is_leaf()) {
    return;
  }
  replaced.mutable_grad() = at::detail::make_tensor<RetiredGradient>(replaced, by);
}

// A fallback for all operators on this key alone: tensors without it never come here.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_operator>());
}

}  // namespace tessera::nn

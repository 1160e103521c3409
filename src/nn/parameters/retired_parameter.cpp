// The trap for optimizers that still hold a parameter which fully_shard or to_empty has replaced.
// They would train values that nobody reads, without an error; instead their gradient is a tensor
// of which every operator throws.

#include "tessera/nn/detail/retired_parameter.h"

#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/detail/placeholder_gradient.h"

namespace tessera::nn {
namespace {

class RetiredGradient final : public PlaceholderGradient {
 public:
  RetiredGradient(const at::Tensor& parameter, std::string by)
      : PlaceholderGradient(parameter), by_(std::move(by)) {}

  [[noreturn]] void refuse() const override {
    fail("an optimizer, or a backward, was to use a parameter of sizes ", sizes_default(), " that ",
         by_, " has replaced since; make torch::optim optimizers after ", by_,
         ", or use a tessera::optim one, which follows its parameters");
  }

 private:
  std::string by_;
};

/// The list is shared, so that hooks which the program takes away by the old tensor go here too.
void move_hooks(const at::Tensor& from, const at::Tensor& to) {
  namespace impl = torch::autograd::impl;
  auto* meta = impl::get_autograd_meta(from);
  if (meta->cpp_hooks_list_ != nullptr) {
    to.register_hook([hooks = meta->cpp_hooks_list_](at::Tensor gradient) {
      for (const auto& hook : *hooks) {
        const at::Tensor changed(hook ? hook(gradient) : at::TensorBase());
        gradient = changed.defined() ? changed : gradient;
      }
      return gradient;
    });
  }
  if (auto& hook = impl::post_acc_grad_hooks(from)) {
    impl::set_post_acc_grad_hooks(to, std::move(hook));
  }
}

}  // namespace

void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by) {
  // No optimizer holds it.
  if (!replaced.requires_grad() || !replaced.is_leaf()) {
    return;
  }
  if (replacement.requires_grad()) {
    move_hooks(replaced, replacement);
  }
  replaced.mutable_grad() = at::detail::make_tensor<RetiredGradient>(replaced, by);
}

}  // namespace tessera::nn

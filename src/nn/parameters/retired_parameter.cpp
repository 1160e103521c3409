// The trap for optimizers that still hold a parameter which fully_shard or to_empty has replaced.
// They would silently train values that are not used; so their gradient becomes a tensor on which
// every operator throws.

#include "tessera/nn/detail/retired_parameter.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/backward.h"
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

}  // namespace

void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by) {
  // No optimizer holds it.
  if (!replaced.requires_grad() || !replaced.is_leaf()) {
    return;
  }
  if (replacement.requires_grad()) {
    tessera::detail::move_hooks(replaced, replacement);
  }
  replaced.mutable_grad() = tessera::detail::make_placeholder<RetiredGradient>(replaced, by);
}

}  // namespace tessera::nn

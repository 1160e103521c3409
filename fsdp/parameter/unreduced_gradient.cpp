// Waiting gradients are kept in the tensor that the program holds as the gradient, and dropped with
// it. libtorch does not notify about dropped gradients; a separate list would outlive them.

#include "parameter/unreduced_gradient.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::fsdp {

UnreducedGradient::UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier,
                                     std::string name)
    : PlaceholderGradient(parameter), reduced(std::move(earlier)), name_(std::move(name)) {}

void UnreducedGradient::refuse() const {
  fail("the gradient of ", name_,
       " was asked for, which is not reduced over the ranks yet: the last backward ran under "
       "set_requires_gradient_sync(false), set_requires_all_reduce(false) or "
       "set_is_last_backward(false); run one with all of them true first, or drop the gradient "
       "with zero_grad");
}

bool UnreducedGradient::run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::detach" || name == "aten::detach_") {
    return true;  // the result is the argument
  }
  if (name == "aten::zero_") {
    drop();
    return true;
  }
  if (op.operator_name() == c10::OperatorName("aten::add_", "Tensor")) {
    const at::Scalar factor = torch::jit::pop(stack).toScalar();
    const at::Tensor term = torch::jit::pop(stack).toTensor().mul(factor);
    reduced = reduced.defined() ? reduced.add(term) : term;
    return true;
  }
  return false;
}

void UnreducedGradient::drop() {
  kept.reset();
  scattered = {};
  expects = false;
  reduced.reset();
}

void UnreducedGradient::release_resources() {
  drop();
  PlaceholderGradient::release_resources();
}

UnreducedGradient* unreduced(const at::Tensor& gradient) {
  return tessera::detail::impl_cast<UnreducedGradient>(gradient);
}

}  // namespace tessera::fsdp

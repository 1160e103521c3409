#include "slot_gradient.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {

at::Tensor slot_gradient(const nn::ParameterSlot& slot) {
  const at::Tensor& parameter = slot.persistent();
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined()) return grad;
  TESSERA_CHECK(tessera::is_distributed(grad) == tessera::is_distributed(parameter),
                "a parameter of sizes ", parameter.sizes(), " is ",
                tessera::is_distributed(parameter) ? "distributed, its gradient plain"
                                                   : "plain, its gradient distributed",
                "; backward must run through the tensor that the slot holds");
  if (!tessera::is_distributed(grad) || sharding_spec(grad) == sharding_spec(parameter))
    return grad;
  const c10::AutoGradMode no_grad(false);
  const at::Tensor aligned =
      DistributedTensor(grad).redistribute(sharding_spec(parameter).layout).tensor();
  parameter.mutable_grad() = aligned;
  return aligned;
}

}  // namespace tessera::optim

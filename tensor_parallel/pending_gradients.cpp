// Gradients of replicated parameters in a sequence-parallel region: a hook on each leaf takes its
// term away from autograd, and a callback at the end of backward sums all terms together and puts
// the sums into .grad.

#include "pending_gradients.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "tessera/dtensor/detail/end_of_backward.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/gradient_hooks.h"
#include "tessera/internals/detail/running_backward.h"
#include "tessera/internals/detail/tensor_identity.h"

namespace tessera::tensor_parallel {

void PendingGradients::watch(const std::vector<nn::SlotPtr>& slots) {
  for (const nn::SlotPtr& slot : slots) {
    const at::Tensor& leaf = slot->get();
    // leave_gradient_pending() is true only once for a leaf, so that it gets one hook.
    if (leaf.requires_grad() && tessera::is_distributed(leaf) &&
        sharding_spec(leaf).layout->is_replicated() && leave_gradient_pending(leaf)) {
      watch(leaf);
    }
  }
}

void PendingGradients::watch(const at::Tensor& leaf) {
  // By weak reference: the hook lives in the leaf's own autograd state, and would keep it alive.
  const tessera::detail::WeakTensor weak(leaf);
  using tessera::detail::OwnHook;
  tessera::detail::add_own_hook(leaf, OwnHook::kLayout,
                                [self = shared_from_this(), weak](const at::Tensor& gradient) {
                                  // Autograd holds the leaf while its hook runs, so that lock()
                                  // succeeds.
                                  return self->take(weak.lock(), gradient);
                                });
}

at::Tensor PendingGradients::take(const at::Tensor& leaf, const at::Tensor& gradient) {
  if (!gradient.defined() || !tessera::is_distributed(gradient)) {
    return gradient;
  }
  // nullptr: it is complete, or needs more than a sum.
  comm::Communicator* group = tessera::detail::pending_sum_group(gradient, leaf);
  if (group == nullptr) {
    return gradient;
  }
  const c10::AutoGradMode no_grad(false);
  begin(tessera::detail::backward_id());
  terms_.push_back({leaf, local_tensor(gradient), group});
  // Zeros, so that autograd makes a .grad (or adds nothing to the one there), to which settle()
  // adds the sum.
  return make_distributed(at::zeros_like(local_tensor(gradient)), sharding_spec(leaf),
                          leaf.sizes().vec());
}

void PendingGradients::begin(int backward) {
  // The callback is queued with the first term of a backward; the number tells backwards apart.
  if (backward_ == backward) {
    return;
  }
  backward_ = backward;
  terms_.clear();  // of a backward that failed
  tessera::detail::call_at_end_of_backward([self = shared_from_this()] { self->settle(); });
}

void PendingGradients::settle() {
  const c10::AutoGradMode no_grad(false);
  tessera::detail::DeferredSums sums;
  for (const Term& term : std::exchange(terms_, {})) {
    sums.add(*term.group, term.value,
             [leaf = term.leaf](const at::Tensor& sum) { local_tensor(leaf.grad()).add_(sum); });
  }
  sums.run();
  // So that the next backward queues its own callback, whatever its number.
  backward_ = -1;
}

}  // namespace tessera::tensor_parallel

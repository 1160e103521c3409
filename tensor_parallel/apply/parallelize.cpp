// parallelize_module: applies a plan of styles to the modules that its patterns match. The plan is
// checked first, then all parameters are distributed, then hooks are added, so that a plan with an
// error changes nothing.

#include "tessera/tensor_parallel/parallelize.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <utility>
#include <vector>

#include "apply/apply_plan.h"
#include "apply/plan_recorder.h"
#include "equal_copies.h"
#include "plan/checked_plan.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/gradients.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/parameter.h"

namespace tessera::tensor_parallel {
namespace {

// Gradients of replicated parameters in a sequence-parallel region: a hook on each leaf takes its
// term away from autograd, and a callback at the end of backward sums all terms together and puts
// the sums into .grad.

/// Completes the gradients of replicated parameters under sequence parallelism. Each rank saw a
/// part of the tokens, so its gradient is one term of a sum over the ranks. The terms are kept here
/// and summed together when backward ends, in one all-reduce instead of a small one for each.
///
/// FSDP does not use this class, though it defers the same sums (DeferredSums): it takes a gradient
/// off the leaf before backward ends, keeps the term through gradient accumulation and the
/// reduce-scatter, and sums it where it is smallest, on the shards. There is then no .grad of the
/// leaf to complete. The first caller of leave_gradient_pending() on a leaf completes its gradient:
/// for FSDP's unsharded parameters that is FSDP.
class PendingGradients : public std::enable_shared_from_this<PendingGradients> {
 public:
  /// Watches the leaves that are in these slots now and are replicated. Cheap for leaves that are
  /// watched already.
  void watch(const std::vector<nn::SlotPtr>& slots) {
    for (const nn::SlotPtr& slot : slots) {
      const at::Tensor& leaf = slot->get();
      // leave_gradient_pending() is true only once for a leaf, so that it gets one hook.
      if (leaf.requires_grad() && tessera::is_distributed(leaf) &&
          sharding_spec(leaf).layout->is_replicated() && leave_gradient_pending(leaf)) {
        watch(leaf);
      }
    }
  }

 private:
  struct Term {
    at::Tensor leaf;
    at::Tensor value;
    comm::Communicator* group;
  };

  void watch(const at::Tensor& leaf) {
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
  /// Keeps `gradient` if it is a pending sum. Returns what autograd adds to .grad instead.
  at::Tensor take(const at::Tensor& leaf, const at::Tensor& gradient) {
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
  /// Has settle() called at the end of this backward.
  void begin(int backward) {
    // The callback is queued with the first term of a backward; the number tells backwards apart.
    if (backward_ == backward) {
      return;
    }
    backward_ = backward;
    terms_.clear();  // terms that a failed backward left
    tessera::detail::call_at_end_of_backward([self = shared_from_this()] { self->settle(); });
  }
  /// Sums the kept terms and adds the sums to the leaves' .grad. Collective.
  void settle() {
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

  int backward_ = -1;  ///< autograd's number of the backward under way; -1: none
  std::vector<Term> terms_;
};

using tessera::detail::RandomRegion;
using tessera::detail::RandomRegionScope;

/// Undoes the replication by an earlier plan that did not name the parameter: each rank has it all.
void make_plain(nn::ParameterSlot& slot) {
  const at::Tensor before = slot.get();
  slot.swap(local_tensor(before).detach().requires_grad_(before.requires_grad()));
  slot.set_replicated_by_default(false);
  if (before.requires_grad()) {
    nn::retire_parameter(before, slot.get(), "parallelize_module");
  }
}

void distribute_parameters(const CheckedPlan& plan, const DeviceMesh& mesh) {
  for (const auto& [slot, placement] : plan.parameters) {
    if (slot->replicated_by_default()) {
      make_plain(*slot);
    }
    // A tied parameter that an earlier call distributed has been checked already.
    if (!tessera::is_distributed(slot->get())) {
      nn::distribute_parameter(*slot, mesh, {placement}, "parallelize_module");
    }
  }
  for (const auto& [fqn, slot] : plan.unnamed) {
    nn::distribute_parameter(*slot, mesh, {Replicate{}}, "parallelize_module");
    slot->set_replicated_by_default(true);
  }
}

std::vector<nn::SlotPtr> replicated_by(const Application& application) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [slot, placement] : application.parameters) {
    if (is_replicate(placement)) {
      slots.push_back(slot);
    }
  }
  return slots;
}

std::vector<nn::SlotPtr> slots_of(const nn::NamedSlots& named) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [fqn, slot] : named) {
    slots.push_back(slot);
  }
  return slots;
}

/// Replicated parameters may get gradients that are pending sums. Watched at every call, because
/// the tensors in the slots change (nn::to_empty, FSDP).
void watch_replicated(nn::ModuleBase& module, std::vector<nn::SlotPtr> slots,
                      const std::shared_ptr<PendingGradients>& pending) {
  if (!slots.empty()) {
    module.add_forward_pre_hook(
        [pending, slots = std::move(slots)](auto&, nn::TensorList) { pending->watch(slots); },
        nn::HookedCalls::kEveryMethod);
  }
}

/// Within the module's forward plain tensors are the same on every rank of `mesh`. A module with a
/// style may also be called directly, not through the root.
void add_parallel_forward(nn::ModuleBase& module, const DeviceMesh& mesh) {
  // Several if the module calls itself; empty within the forward of another.
  const auto scopes = std::make_shared<std::vector<std::unique_ptr<RandomRegionScope>>>();
  module.add_forward_pre_hook([scopes, mesh](auto&, nn::TensorList) {
    const tessera::detail::RandomRegionPtr& outer = tessera::detail::random_region();
    std::unique_ptr<RandomRegionScope>& scope = scopes->emplace_back();
    if (outer == nullptr || !outer->replicates_on(mesh)) {
      scope =
          std::make_unique<RandomRegionScope>(std::make_shared<RandomRegion>(outer, nullptr, mesh));
    }
  }, nn::HookedCalls::kEveryMethod);
  module.add_always_hook([scopes] {
    // Another hook may have thrown before ours ran.
    if (!scopes->empty()) {
      scopes->pop_back();
    }
  }, nn::HookedCalls::kEveryMethod);
}

}  // namespace

void apply_plan(const CheckedPlan& plan, nn::ModuleBase& module, const DeviceMesh& mesh,
                const std::shared_ptr<PlanRecorder>& recorder) {
  distribute_parameters(plan, mesh);
  if (recorder != nullptr) {
    recorder->watch_root(module);
  }
  // First, so that the styles' hooks run inside it.
  add_parallel_forward(module, mesh);
  // One for this call, so that the sums of all its modules are one all-reduce.
  const auto pending = std::make_shared<PendingGradients>();
  watch_replicated(module, slots_of(plan.unnamed), pending);
  const auto copies = std::make_shared<EqualCopies>(module, mesh);
  for (std::size_t i = 0; i < plan.applications.size(); ++i) {
    const Application& application = plan.applications[i];
    nn::ModuleBase& target = *application.target.module;
    if (copies->add(target, application.target.fqn) && &target != &module) {
      add_parallel_forward(target, mesh);
    }
    // A part of what nn::Hooked holds runs no hooks: the root's see to its parameters.
    const bool is_called = dynamic_cast<const nn::AdoptedModule*>(&target) == nullptr;
    // Before the style's operators use the parameters.
    watch_replicated(is_called ? target : module, replicated_by(application), pending);
    if (!is_called) {
      continue;
    }
    if (recorder != nullptr) {
      recorder->begin_style(target);
    }
    application.style->apply(target, mesh);
    if (recorder != nullptr) {
      recorder->end_style(target, i);
    }
  }
  copies->watch_root(module);
}

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan) {
  apply_plan(check_entries(module, mesh, plan), module, mesh);
}

}  // namespace tessera::tensor_parallel

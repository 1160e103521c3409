// Parameters that a plan forgets. What a forward computes with them is not known before it runs:
// whether they meet parts is found there (region.cpp). But one that stands beside split ones is
// asked for at once, before a long run is started.

#include <algorithm>
#include <unordered_set>

#include "plan/checked_plan.h"
#include "plan/plan_text.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {
namespace {

using Slots = std::unordered_set<const nn::ParameterSlot*>;

/// What a plan says of parameters.
class Coverage {
 public:
  explicit Coverage(const CheckedPlan& plan) {
    for (const PlacedParameter& parameter : plan.parameters) {
      covered_.insert(parameter.slot.get());
      if (!is_replicate(parameter.placement)) {
        split_.insert(parameter.slot.get());
      }
    }
    for (const Application& application : plan.applications) {
      for (const nn::SlotPtr& slot :
           application.style->plain_parameters(*application.target.module)) {
        covered_.insert(slot.get());
      }
    }
  }

  /// A frozen parameter gets no gradient that could be one rank's. One that is distributed was
  /// placed by hand, or by an earlier plan.
  bool forgets(const nn::ParameterSlot& slot) const {
    const at::Tensor& tensor = slot.persistent();
    return tensor.requires_grad() && !tessera::is_distributed(tensor) && !covered_.contains(&slot);
  }

  /// Whether a parameter of the module's own is split.
  bool splits(const torch::nn::Module& module) const {
    const auto* base = dynamic_cast<const nn::ModuleBase*>(&module);
    return base != nullptr && std::ranges::any_of(base->slots(), [this](const auto& entry) {
             return split_.contains(entry.second.get());
           });
  }

 private:
  Slots covered_, split_;
};

/// `beside`: of `module` and those above it the one that stands beside `neighbour`.
[[noreturn]] void fail_forgotten(const std::string& module, const std::string& name,
                                 const std::string& beside, const std::string& neighbour) {
  fail("parallelize_module: no entry of the plan covers parameter '", nn::join_fqn(module, name),
       "', but its neighbour '", neighbour, "' is split: on what is split each rank would get ",
       "another gradient of it; give '", pattern_of(module),
       "' a style, for a module that computes ", "on parts ", line_for_parts(module),
       ", or say with {\"", pattern_of(beside),
       "\", leave_plain()} that it computes the same on every rank");
}

/// Throws where the plan forgets a parameter of `module`, which stands beside `neighbour`, or one
/// below it. Where something below is split, what is below has neighbours of its own.
void check_beside(const std::string& fqn, const torch::nn::Module& module,
                  const std::string& neighbour, const Coverage& coverage) {
  bool splits_below = false;
  nn::visit_modules(module, [&](const std::string& path, const torch::nn::Module& below) {
    splits_below = splits_below || (!path.empty() && coverage.splits(below));
  });
  nn::visit_modules(module, [&](const std::string& path, const nn::ModuleBase& below) {
    if (!path.empty() && splits_below) {
      return;
    }
    for (const auto& [name, slot] : below.slots()) {
      if (coverage.forgets(*slot)) {
        fail_forgotten(path.empty() ? fqn : nn::join_fqn(fqn, path), name, fqn, neighbour);
      }
    }
  });
}

}  // namespace

void check_coverage(const nn::ModuleBase& root, const CheckedPlan& plan) {
  const Coverage coverage(plan);
  nn::visit_modules(root, [&](const std::string& fqn, const torch::nn::Module& parent) {
    const auto children = parent.named_children();
    const auto split = std::ranges::find_if(
        children, [&](const auto& child) { return coverage.splits(*child.value()); });
    if (split == children.end()) {
      return;
    }
    for (const auto& child : children) {
      check_beside(nn::join_fqn(fqn, child.key()), *child.value(), nn::join_fqn(fqn, split->key()),
                   coverage);
    }
  });
}

}  // namespace tessera::tensor_parallel

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
struct Coverage {
  Slots covered, split;

  explicit Coverage(const CheckedPlan& plan) {
    for (const PlacedParameter& parameter : plan.parameters) {
      covered.insert(parameter.slot.get());
      if (!is_replicate(parameter.placement)) {
        split.insert(parameter.slot.get());
      }
    }
    for (const Application& application : plan.applications) {
      for (const nn::SlotPtr& slot :
           application.style->plain_parameters(*application.target.module)) {
        covered.insert(slot.get());
      }
    }
  }
};

/// The modules of which `parent` is the parent and that have parameters of their own.
std::vector<NamedModule> children_of(const std::string& fqn, const torch::nn::Module& parent) {
  std::vector<NamedModule> children;
  for (const auto& child : parent.named_children()) {
    auto* module = dynamic_cast<nn::ModuleBase*>(child.value().get());
    if (module != nullptr && !module->slots().empty()) {
      children.push_back({nn::join_fqn(fqn, child.key()), module});
    }
  }
  return children;
}

/// A frozen parameter gets no gradient that could be one rank's. One that is distributed was placed
/// by hand, or by an earlier plan.
bool is_forgotten(const nn::ParameterSlot& slot, const Coverage& coverage) {
  const at::Tensor& tensor = slot.persistent();
  return tensor.requires_grad() && !tessera::is_distributed(tensor) &&
         !coverage.covered.contains(&slot);
}

[[noreturn]] void fail_forgotten(const std::string& module, const std::string& name,
                                 const std::string& neighbour) {
  fail("parallelize_module: no entry of the plan covers parameter '", nn::join_fqn(module, name),
       "', but its neighbour '", neighbour, "' is split: on what is split each rank would get ",
       "another gradient of it; give '", pattern_of(module),
       "' a style, for a module that computes ", "on parts ", line_for_parts(module),
       ", or say with {\"", pattern_of(module),
       "\", leave_plain()} that it computes the same on every rank");
}

}  // namespace

void check_coverage(const nn::ModuleBase& root, const CheckedPlan& plan) {
  const Coverage coverage(plan);
  nn::visit_modules(root, [&](const std::string& fqn, const torch::nn::Module& parent) {
    const std::vector<NamedModule> children = children_of(fqn, parent);
    const auto is_split = [&coverage](const NamedModule& child) {
      return std::ranges::any_of(child.module->slots(), [&](const auto& entry) {
        return coverage.split.contains(entry.second.get());
      });
    };
    const auto split = std::ranges::find_if(children, is_split);
    if (split == children.end()) {
      return;
    }
    for (const NamedModule& child : children) {
      for (const auto& [name, slot] : child.module->slots()) {
        if (is_forgotten(*slot, coverage)) {
          fail_forgotten(child.fqn, name, split->fqn);
        }
      }
    }
  });
}

}  // namespace tessera::tensor_parallel

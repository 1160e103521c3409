// plan_units: asks a policy of each module which should be units, and puts every parameter into the
// lowest unit that holds it. Nothing is changed and no value is read, so that models on the meta
// device can be planned.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "plan/applied_units.h"
#include "plan/named_policy.h"
#include "plan/tree_parameters.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/fqn_pattern.h"

namespace tessera::fsdp {
namespace {

/// Asks the policy of each module, bottom-up.
class UnitChooser {
 public:
  UnitChooser(const ModuleTree& tree, const Policy& policy) : tree_(tree), policy_(policy) {}

  std::vector<std::pair<std::string, UnitOptions>> choose() {
    std::vector<std::pair<std::string, UnitOptions>> chosen;
    left_.resize(tree_.nodes().size());
    // Children come before parents, so that a policy by size sees what the units below left over.
    for (std::size_t i = 0; i + 1 < tree_.nodes().size(); ++i) {  // the last is the root
      const ModuleTree::Node& node = tree_.nodes()[i];
      left_[i] = own_numel(node);
      for (const std::size_t child : node.children) {
        left_[i] += left_[child];
      }
      if (std::optional<UnitOptions> options = policy_({node.fqn, *node.module, left_[i]})) {
        TESSERA_CHECK(dynamic_cast<const nn::ModuleList*>(node.module) == nullptr,
                      "plan_units: the policy chose '", node.fqn,
                      "', a ModuleList, which has no forward; choose the modules in it");
        // Parents need not gather what a unit has.
        left_[i] = 0;
        chosen.emplace_back(node.fqn, *std::move(options));
      }
    }
    return chosen;
  }

 private:
  std::int64_t own_numel(const ModuleTree::Node& node) {
    std::int64_t numel = 0;
    for (const auto& [name, slot] : node.module->slots()) {
      // A tied parameter counts where it is met first.
      numel += counted_.insert(slot.get()).second ? slot->get().numel() : 0;
    }
    return numel;
  }

  const ModuleTree& tree_;
  const Policy& policy_;
  std::vector<std::int64_t> left_;  ///< for each node: elements that no unit has
  std::set<const nn::ParameterSlot*> counted_;
};

/// Modules that are units already count as well: a plan may be made again.
void check_patterns(const nn::ModuleBase& root, const Policy& policy) {
  const ModuleTree all(root, /*skip_units=*/false);
  for_each_pattern(policy, [&](const std::string& pattern) {
    const bool found = std::ranges::any_of(all.nodes(), [&](const ModuleTree::Node& node) {
      return std::ranges::any_of(
          node.paths, [&](const std::string& path) { return nn::matches_fqn(pattern, path); });
    });
    TESSERA_CHECK(found, "plan_units: no module of this ", root.name(),
                  " is called as the pattern '", pattern,
                  "' of wrap_named says; correct the pattern, or leave it out");
  });
}

/// A unit's options: each field from its policy if set, else from the root.
Options merged(const UnitOptions& unit, const Options& root) {
  Options options = root;
  options.mp_policy = unit.mp_policy.value_or(root.mp_policy);
  options.offload_policy = unit.offload_policy.value_or(root.offload_policy);
  options.post_forward_mesh_size =
      unit.post_forward_mesh_size.value_or(root.post_forward_mesh_size);
  options.shard_over_replicas = unit.shard_over_replicas.value_or(root.shard_over_replicas);
  options.may_be_unused = unit.may_be_unused.value_or(root.may_be_unused);
  options.reshard_after_forward =
      unit.reshard_after_forward ? unit.reshard_after_forward : root.reshard_after_forward;
  options.shard_placement = unit.shard_placement ? unit.shard_placement : root.shard_placement;
  options.parameter_mesh = unit.parameter_mesh ? unit.parameter_mesh : root.parameter_mesh;
  options.all_gather_extension =
      unit.all_gather_extension ? unit.all_gather_extension : root.all_gather_extension;
  return options;
}

/// A unit with one trainable parameter is gathered in every backward, and its frozen ones with it.
/// Alone they would be gathered only where a gradient passes through them.
void check_frozen(const PlannedUnit& unit, const std::map<std::string, nn::SlotPtr>& slots) {
  if (unit.frozen_numel == 0 || unit.frozen_numel == unit.numel) {
    return;
  }
  std::string frozen;
  std::int64_t bytes = 0;
  for (const std::string& name : unit.parameters) {
    const at::Tensor& tensor = slots.at(name)->persistent();
    if (!tensor.requires_grad()) {
      frozen += (frozen.empty() ? "'" : ", '") + name + "'";
      bytes += static_cast<std::int64_t>(tensor.numel() * tensor.itemsize());
    }
  }
  fail("plan_units: ", name_of(unit.fqn),
       " would be one unit of trainable parameters and frozen ones (", frozen, "), whose ", bytes,
       " bytes are gathered with every backward; give the frozen modules their own unit, or ",
       unit.fqn.empty() ? "pass MixedFrozenRoot::kAllowed" : "set allow_mixed_frozen");
}

/// Puts each parameter into the lowest unit that holds its owners. Units come bottom-up, so it is
/// the first that does.
std::map<std::string, nn::SlotPtr> distribute(const ModuleTree& tree, WrapPlan& plan) {
  std::vector<const ModuleTree::Node*> nodes;
  for (const PlannedUnit& unit : plan) {
    nodes.push_back(tree.find(unit.fqn));
  }
  std::map<std::string, nn::SlotPtr> slots;
  for (const TreeParameter& parameter : parameters_of(tree)) {
    if (plan.back().options.ignored.contains(parameter.slot)) {
      continue;
    }
    // Always found: the root is the last unit and holds every module of the tree.
    const auto lowest = std::ranges::find_if(
        nodes, [&](const ModuleTree::Node* node) { return node->holds(parameter.owners); });
    PlannedUnit& unit = plan[static_cast<std::size_t>(lowest - nodes.begin())];
    const at::Tensor& tensor = parameter.slot->persistent();
    unit.parameters.push_back(parameter.fqn);
    unit.numel += tensor.numel();
    unit.frozen_numel += tensor.requires_grad() ? 0 : tensor.numel();
    slots.emplace(parameter.fqn, parameter.slot);
  }
  return slots;
}

}  // namespace

WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy, const Options& root_options,
                    MixedFrozenRoot mixed_frozen_root) {
  TESSERA_CHECK(policy != nullptr,
                "plan_units was given an empty policy; pass one such as wrap_class<Block>()");
  const ModuleTree tree = plannable_tree(root, "plan_units");
  check_patterns(root, policy);
  WrapPlan plan;
  std::vector<bool> mixed_allowed;
  for (const auto& [fqn, unit] : UnitChooser(tree, policy).choose()) {
    plan.push_back({fqn, merged(unit, root_options), {}, 0, 0});
    mixed_allowed.push_back(unit.allow_mixed_frozen);
  }
  plan.push_back({"", root_options, {}, 0, 0});
  mixed_allowed.push_back(mixed_frozen_root == MixedFrozenRoot::kAllowed);

  const std::map<std::string, nn::SlotPtr> slots = distribute(tree, plan);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!mixed_allowed[i]) {
      check_frozen(plan[i], slots);
    }
  }
  return plan;
}

}  // namespace tessera::fsdp

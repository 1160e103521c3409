// Wrap plans: which modules of a tree become units. plan_units calls a policy for each module and
// puts every parameter into the lowest unit that contains the parameter. apply_plan checks a plan,
// which the caller may have changed or made for another tree, and makes the units. Only apply_plan
// changes the model.

#include <map>
#include <set>

#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/module.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

/// A module's name in messages: "the root", or the FQN in quotes.
std::string name_of(const std::string& fqn) {
  return fqn.empty() ? "the root" : "'" + fqn + "'";
}

/// A policy with a pattern. The type is named, so that check_pattern finds it inside of a
/// std::function.
struct NamedPolicy {
  std::optional<Options> operator()(const Candidate& candidate) const {
    return nn::matches_fqn(pattern, candidate.fqn) ? std::optional(candidate.root_options)
                                                   : std::nullopt;
  }

  std::string pattern;
};

/// Throws Error for a pattern that matches no module. Modules that are units already count as
/// matches.
void check_pattern(const nn::ModuleBase& root, const Policy& policy) {
  const auto* named = policy.target<NamedPolicy>();
  if (named == nullptr) {
    return;
  }
  const ModuleTree all(root, /*skip_units=*/false);
  const bool found = std::ranges::any_of(all.nodes(), [&](const ModuleTree::Node& node) {
    return std::ranges::any_of(
        node.paths, [&](const std::string& path) { return nn::matches_fqn(named->pattern, path); });
  });
  TESSERA_CHECK(found, "plan_units: no module of this ", root.name(), " matches the pattern '",
                named->pattern, "' of wrap_named; correct the pattern, or leave it out");
}

/// The modules of `root` that are in no unit. Throws Error if `root` is a unit. `call`: the
/// caller's name in messages.
ModuleTree plannable_tree(const nn::ModuleBase& root, const char* call) {
  ModuleTree tree(root, /*skip_units=*/true);
  TESSERA_CHECK(!tree.nodes().empty(), call, ": this ", root.name(),
                " is a unit already; pass a module to which fully_shard, replicate or apply_plan "
                "was not applied");
  return tree;
}

/// All FQNs of all modules that share the parameter. Throws Error for a module outside of the tree.
std::vector<std::string> owners_of(const nn::ParameterSlot& slot, const std::string& fqn,
                                   const ModuleTree& tree) {
  std::vector<std::string> owners;
  for (const nn::ParameterSlot::Owner& owner : slot.owners()) {
    const ModuleTree::Node* node = tree.find(owner.module);
    TESSERA_CHECK(
        node != nullptr, "plan_units: parameter '", fqn, "' is shared with a ",
        owner.module->name(),
        " that is not in this tree or is a unit already; plan the module that holds both");
    owners.insert(owners.end(), node->paths.begin(), node->paths.end());
  }
  return owners;
}

/// The units that `policy` chooses. Visits children first, so that a policy by size sees only the
/// parameters that the units below have not taken.
WrapPlan chosen_units(const ModuleTree& tree, const Policy& policy, const Options& root_options) {
  WrapPlan plan;
  // The number of parameter elements below each node that are in no unit yet.
  std::vector<std::int64_t> left(tree.nodes().size());
  std::set<const nn::ParameterSlot*> counted;
  for (std::size_t i = 0; i + 1 < tree.nodes().size(); ++i) {  // the last node is the root
    const ModuleTree::Node& node = tree.nodes()[i];
    for (const auto& [name, slot] : node.module->slots()) {
      left[i] += counted.insert(slot.get()).second ? slot->get().numel() : 0;
    }
    for (const std::size_t child : node.children) {
      left[i] += left[child];
    }
    if (std::optional<Options> options = policy({node.fqn, *node.module, left[i], root_options})) {
      TESSERA_CHECK(dynamic_cast<const nn::ModuleList*>(node.module) == nullptr,
                    "plan_units: the policy chose '", node.fqn,
                    "', a ModuleList, which has no forward; choose the modules in it");
      left[i] = 0;
      plan.push_back({node.fqn, *std::move(options), {}, 0, 0});
    }
  }
  plan.push_back({"", root_options, {}, 0, 0});
  return plan;
}

/// Puts each parameter into the lowest unit that contains all modules that own the parameter, under
/// the parameter's first FQN. The plan lists children first, so the first unit that contains all of
/// these modules is the lowest. Throws Error for a parameter that a module outside of the tree
/// shares, and for a parameter without a slot.
std::map<std::string, nn::SlotPtr> distribute(const ModuleTree& tree, WrapPlan& plan) {
  tree.nodes().back().module->named_slots();  // throws if a parameter has no ParameterSlot
  std::vector<const ModuleTree::Node*> units;
  for (const PlannedUnit& unit : plan) {
    units.push_back(tree.find(unit.fqn));
  }
  std::map<std::string, nn::SlotPtr> slots;
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const ModuleTree::Node& node : tree.nodes()) {
    for (const auto& [name, slot] : node.module->slots()) {
      if (!seen.insert(slot.get()).second) {
        continue;
      }
      const std::string fqn = nn::detail::join_fqn(node.fqn, name);
      const std::vector<std::string> owners = owners_of(*slot, fqn, tree);
      if (plan.back().options.ignored.contains(slot)) {
        continue;
      }
      // The search always succeeds, because the root is the last unit and contains every module of
      // the tree.
      const auto lowest = std::ranges::find_if(
          units, [&](const ModuleTree::Node* unit) { return unit->holds(owners); });
      PlannedUnit& unit = plan[static_cast<std::size_t>(lowest - units.begin())];
      const at::Tensor& tensor = slot->persistent();
      unit.parameters.push_back(fqn);
      unit.numel += tensor.numel();
      unit.frozen_numel += tensor.requires_grad() ? 0 : tensor.numel();
      slots.emplace(fqn, slot);
    }
  }
  return slots;
}

/// Throws Error for a unit with both frozen and trainable parameters. The frozen parameters of such
/// a unit are gathered in every backward. In a separate unit, frozen parameters are gathered only
/// if a gradient passes through the unit.
void check_frozen(const PlannedUnit& unit, const std::map<std::string, nn::SlotPtr>& slots) {
  if (unit.options.allow_mixed_frozen || unit.frozen_numel == 0 ||
      unit.frozen_numel == unit.numel) {
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
  fail("plan_units: ", name_of(unit.fqn), " would be one unit of trainable and frozen parameters (",
       frozen, "), whose ", bytes,
       " bytes are gathered with every backward; give the frozen modules a unit of their own, or "
       "set Options::allow_mixed_frozen");
}

/// Throws Error unless `plan` has units of modules of `tree`, each once and the root last.
void check_units(const ModuleTree& tree, const WrapPlan& plan) {
  std::set<std::string> units;
  for (const PlannedUnit& unit : plan) {
    TESSERA_CHECK(
        tree.find(unit.fqn) != nullptr, "apply_plan: the plan has a unit ", name_of(unit.fqn),
        ", but there is no such module without a unit; make the plan of this module tree");
    TESSERA_CHECK(units.insert(unit.fqn).second, "apply_plan: the plan has a unit ",
                  name_of(unit.fqn), " twice; remove one");
  }
  TESSERA_CHECK(!plan.empty() && plan.back().fqn.empty(),
                "apply_plan: the last unit of the plan is not the root; put the root last");
}

/// Throws Error if `planned` has other parameters than distribute() gave `unit`, the same unit.
void check_parameters(const PlannedUnit& planned, const PlannedUnit& unit) {
  const auto [wrong, right] = std::ranges::mismatch(planned.parameters, unit.parameters);
  const bool equal = wrong == planned.parameters.end() && right == unit.parameters.end();
  TESSERA_CHECK(equal, "apply_plan: the unit ", name_of(unit.fqn),
                " of the plan has other parameters than its module in this tree, first ",
                wrong == planned.parameters.end() ? "none" : "'" + *wrong + "'", " instead of ",
                right == unit.parameters.end() ? "none" : "'" + *right + "'",
                "; make the plan of this module tree, or name a parameter in the root's "
                "Options::ignored");
}

}  // namespace

Policy wrap_if(std::function<bool(const Candidate&)> predicate) {
  return [predicate = std::move(predicate)](const Candidate& candidate) {
    return predicate(candidate) ? std::optional(candidate.root_options) : std::nullopt;
  };
}

Policy wrap_named(std::string pattern) {
  return NamedPolicy{std::move(pattern)};
}

WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy, const Options& root_options) {
  TESSERA_CHECK(policy != nullptr,
                "plan_units was given an empty policy; pass one such as wrap_class<Block>()");
  const ModuleTree tree = plannable_tree(root, "plan_units");
  check_pattern(root, policy);
  WrapPlan plan = chosen_units(tree, policy, root_options);
  const std::map<std::string, nn::SlotPtr> slots = distribute(tree, plan);
  for (const PlannedUnit& unit : plan) {
    check_frozen(unit, slots);
  }
  return plan;
}

void apply_plan(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan) {
  const ModuleTree tree = plannable_tree(root, "apply_plan");
  const DataMesh data_mesh(mesh);
  check_units(tree, plan);
  WrapPlan found;
  for (const PlannedUnit& unit : plan) {
    found.push_back({unit.fqn, unit.options, {}, 0, 0});
  }
  const std::map<std::string, nn::SlotPtr> slots = distribute(tree, found);
  // All units are checked before the first unit is made.
  std::vector<UnitSpec> specs;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const PlannedUnit& unit = found[i];
    check_parameters(plan[i], unit);
    // In ParameterSpec, names are relative to the unit's module; in the plan, names are relative to
    // the root module.
    const std::size_t prefix = unit.fqn.empty() ? 0 : unit.fqn.size() + 1;
    nn::NamedSlots parameters;
    for (const std::string& fqn : unit.parameters) {
      parameters.emplace_back(fqn.substr(prefix), slots.at(fqn));
    }
    specs.push_back(
        checked_spec({tree.find(unit.fqn)->module}, parameters, data_mesh, unit.options));
  }
  // The batch-norm warning is shown once for the whole plan, with a name relative to the plan's
  // root.
  warn_of_batch_norm(root, mesh.size());
  std::ranges::for_each(specs, make_unit);
}

}  // namespace tessera::fsdp

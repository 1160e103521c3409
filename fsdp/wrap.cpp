// Wrap plans: which modules of a tree become units. plan_units calls a policy for each module and
// puts every parameter into the lowest unit that contains the parameter. apply_plan checks a plan,
// which the caller may have changed or made for another tree, and makes the units. Only apply_plan
// changes the model.

#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/module.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

/// A module's name in messages: "the root", or the FQN in quotes.
std::string name_of(const std::string& fqn) {
  return fqn.empty() ? "the root" : "'" + fqn + "'";
}

// Policies with a pattern have named types, which for_each_pattern finds inside of a std::function,
// so that a pattern that matches no module is an error.

std::optional<Options> own_or_root(const std::optional<Options>& own, const Candidate& candidate) {
  return own ? own : candidate.root_options;
}

struct NamedPolicy {
  std::optional<Options> operator()(const Candidate& candidate) const {
    return nn::matches_fqn(pattern, candidate.fqn) ? own_or_root(options, candidate) : std::nullopt;
  }

  std::string pattern;
  std::optional<Options> options;
};

struct FirstPolicy {
  std::optional<Options> operator()(const Candidate& candidate) const {
    for (const Policy& policy : policies) {
      if (std::optional<Options> options = policy(candidate)) {
        return options;
      }
    }
    return std::nullopt;
  }

  std::vector<Policy> policies;
};

Policy policy_of(std::function<bool(const Candidate&)> predicate, std::optional<Options> options) {
  return
      [predicate = std::move(predicate), options = std::move(options)](const Candidate& candidate) {
        return predicate(candidate) ? own_or_root(options, candidate) : std::nullopt;
      };
}

/// Calls `act` for each pattern that `policy` contains.
void for_each_pattern(const Policy& policy, const std::function<void(const std::string&)>& act) {
  if (const auto* named = policy.target<NamedPolicy>()) {
    act(named->pattern);
  } else if (const auto* first = policy.target<FirstPolicy>()) {
    for (const Policy& each : first->policies) {
      for_each_pattern(each, act);
    }
  }
}

/// Throws Error for a pattern that matches no module. Modules that are units already count as
/// matches.
void check_patterns(const nn::ModuleBase& root, const Policy& policy) {
  const ModuleTree all(root, /*skip_units=*/false);
  for_each_pattern(policy, [&](const std::string& pattern) {
    const bool found = std::ranges::any_of(all.nodes(), [&](const ModuleTree::Node& node) {
      return std::ranges::any_of(
          node.paths, [&](const std::string& path) { return nn::matches_fqn(pattern, path); });
    });
    TESSERA_CHECK(found, "plan_units: no module of this ", root.name(), " matches the pattern '",
                  pattern, "' of wrap_named; correct the pattern, or leave it out");
  });
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

struct TreeParameter {
  std::string fqn;
  nn::SlotPtr slot;
  std::vector<std::string> owners;  ///< all FQNs of all modules that share the parameter
};

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

/// Every parameter of a tree once, in the order of the tree's modules, under the parameter's first
/// FQN. Throws Error for a parameter that a module outside of the tree shares, and for a parameter
/// without a slot.
std::vector<TreeParameter> parameters_of(const ModuleTree& tree) {
  tree.nodes().back().module->named_slots();  // throws for modules whose parameters have no slots
  std::vector<TreeParameter> parameters;
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const ModuleTree::Node& node : tree.nodes()) {
    for (const auto& [name, slot] : node.module->slots()) {
      if (seen.insert(slot.get()).second) {
        std::string fqn = nn::detail::join_fqn(node.fqn, name);
        std::vector<std::string> owners = owners_of(*slot, fqn, tree);
        parameters.push_back({std::move(fqn), slot, std::move(owners)});
      }
    }
  }
  return parameters;
}

/// The units that `policy` chooses. Visits children first, so that a policy by size sees only the
/// parameters that the units below have not taken.
WrapPlan chosen_units(const ModuleTree& tree, const Policy& policy, const Options& root_options) {
  WrapPlan plan;
  // For each node: elements that are in no unit yet.
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

/// Puts each parameter into the lowest unit that contains all modules that own the parameter. The
/// plan lists children first, so the first unit that contains all of these modules is the lowest.
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
    // The search always succeeds, because the root is the last unit and contains every module of
    // the tree.
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

/// A unit of a plan, found in the module tree.
struct Target {
  const PlannedUnit* unit;
  nn::ModuleBase* module;
  nn::NamedSlots parameters;  ///< the unit's parameters, with their names within the unit
};

/// Finds the modules and parameters of a wrap plan, each once.
class TargetFinder {
 public:
  explicit TargetFinder(const ModuleTree& tree) : tree_(tree) {
    for (TreeParameter& parameter : parameters_of(tree)) {
      std::string fqn = parameter.fqn;
      parameters_.emplace(std::move(fqn), std::move(parameter));
    }
  }

  std::vector<Target> find(const WrapPlan& plan) {
    std::vector<Target> targets;
    for (const PlannedUnit& unit : plan) {
      targets.push_back(find(unit));
    }
    check_covered(plan);
    return targets;
  }

 private:
  Target find(const PlannedUnit& unit) {
    const ModuleTree::Node* node = tree_.find(unit.fqn);
    TESSERA_CHECK(
        node != nullptr, "apply_plan: the plan has a unit ", name_of(unit.fqn),
        ", but there is no such module without a unit; make the plan of this module tree");
    TESSERA_CHECK(units_.insert(unit.fqn).second, "apply_plan: the plan has a unit ",
                  name_of(unit.fqn), " twice; remove one");
    Target target{&unit, node->module, {}};
    // Names within a unit are relative to the unit's module; names in the plan are relative to the
    // root.
    const std::size_t prefix = unit.fqn.empty() ? 0 : unit.fqn.size() + 1;
    for (const std::string& fqn : unit.parameters) {
      target.parameters.emplace_back(fqn.substr(prefix), take(fqn, *node));
    }
    return target;
  }

  const nn::SlotPtr& take(const std::string& fqn, const ModuleTree::Node& unit) {
    const auto found = parameters_.find(fqn);
    TESSERA_CHECK(found != parameters_.end(), "apply_plan: the plan has a parameter '", fqn,
                  "', but the module tree does not; make the plan of this module tree");
    const auto [taken, is_first] = taken_.emplace(fqn, unit.fqn);
    TESSERA_CHECK(is_first, "apply_plan: the plan has parameter '", fqn, "' in two units, ",
                  name_of(taken->second), " and ", name_of(unit.fqn), "; remove it from one");
    TESSERA_CHECK(unit.holds(found->second.owners), "apply_plan: the plan has parameter '", fqn,
                  "' in the unit ", name_of(unit.fqn),
                  ", which does not hold every module that has it; put it into one that does");
    return found->second.slot;
  }

  /// Throws Error for a parameter that is in no unit of the plan. Each rank would have the whole
  /// parameter, whose gradient would not be reduced.
  void check_covered(const WrapPlan& plan) const {
    for (const auto& [fqn, parameter] : parameters_) {
      const bool ignored = std::ranges::any_of(plan, [&slot = parameter.slot](auto& unit) {
        return unit.options.ignored.contains(slot);
      });
      TESSERA_CHECK(ignored || taken_.contains(fqn),
                    "apply_plan: the plan has no unit for parameter '", fqn,
                    "'; add it to a unit that holds its module, or to Options::ignored");
    }
  }

  const ModuleTree& tree_;
  std::map<std::string, TreeParameter> parameters_;  ///< all parameters of the tree, by FQN
  /// For each FQN of a parameter that a unit of the plan has: the name of that unit.
  std::map<std::string, std::string> taken_;
  std::set<std::string> units_;
};

}  // namespace

Policy wrap_if(std::function<bool(const Candidate&)> predicate) {
  return policy_of(std::move(predicate), std::nullopt);
}

Policy wrap_if(std::function<bool(const Candidate&)> predicate, Options options) {
  return policy_of(std::move(predicate), std::move(options));
}

Policy wrap_named(std::string pattern) {
  return NamedPolicy{std::move(pattern), std::nullopt};
}

Policy wrap_named(std::string pattern, Options options) {
  return NamedPolicy{std::move(pattern), std::move(options)};
}

Policy wrap_larger_than(std::int64_t numel) {
  return wrap_if([numel](const Candidate& candidate) { return candidate.numel >= numel; });
}

Policy first_of(std::vector<Policy> policies) {
  return FirstPolicy{std::move(policies)};
}

WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy, const Options& root_options) {
  TESSERA_CHECK(policy != nullptr,
                "plan_units was given an empty policy; pass one such as wrap_class<Block>()");
  const ModuleTree tree = plannable_tree(root, "plan_units");
  check_patterns(root, policy);
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
  // All units are checked before the first unit is made.
  std::vector<UnitSpec> specs;
  for (const Target& target : TargetFinder(tree).find(plan)) {
    const Options& options = target.unit->options;
    specs.push_back(checked_spec({target.module}, target.parameters,
                                 choose(target.parameters, data_mesh, options), data_mesh,
                                 options));
  }
  // The batch-norm warning is shown once for the whole plan, with a name relative to the plan's
  // root.
  warn_of_batch_norm(root, mesh.size());
  std::ranges::for_each(specs, make_unit);
}

void apply_plan(nn::ModuleBase& root, const comm::WorldPtr& world, const WrapPlan& plan) {
  apply_plan(root, world_mesh(world), plan);
}

}  // namespace tessera::fsdp

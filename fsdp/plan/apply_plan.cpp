// Makes units from a plan, which its caller may have changed or made of another tree. Three passes:
// find what the plan names, compare or check all of it, make the units. Only the last changes the
// model, so that a wrong plan changes nothing.

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "plan/applied_units.h"
#include "plan/tree_parameters.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/wrap_policy.h"
#include "unit/attached_units.h"
#include "unit/stock_modules.h"
#include "unit/unit_spec.h"

namespace tessera::fsdp {
namespace {

/// A unit of a plan, found in the module tree.
struct Target {
  const PlannedUnit* unit;
  nn::ModuleBase* module;
  nn::NamedSlots parameters;  ///< by their names within the unit
};

/// Finds what a plan names, each parameter once.
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
    TESSERA_CHECK(node != nullptr, "apply_plan: the plan has a unit ", name_of(unit.fqn),
                  ", but there is no such module without a unit; make the plan of "
                  "this module tree");
    TESSERA_CHECK(units_.insert(unit.fqn).second, "apply_plan: the plan has a unit ",
                  name_of(unit.fqn), " twice; leave one of them");
    Target target{&unit, node->module, {}};
    // Names in a unit are relative to its module; the plan has them from the root.
    const std::size_t prefix = unit.fqn.empty() ? 0 : unit.fqn.size() + 1;
    for (const std::string& fqn : unit.parameters) {
      const nn::SlotPtr& slot = take(fqn, *node);
      target.parameters.emplace_back(fqn.substr(prefix), slot);
    }
    return target;
  }

  const nn::SlotPtr& take(const std::string& fqn, const ModuleTree::Node& unit) {
    const auto found = parameters_.find(fqn);
    TESSERA_CHECK(found != parameters_.end(), "apply_plan: the plan has a parameter '", fqn,
                  "', but the module tree has not; make the plan of this module tree");
    // A parameter in two units would be sharded twice.
    const auto [taken, is_first] = taken_.emplace(fqn, unit.fqn);
    TESSERA_CHECK(is_first, "apply_plan: the plan has parameter '", fqn, "' in two units, ",
                  name_of(taken->second), " and ", name_of(unit.fqn), "; leave it in one");
    TESSERA_CHECK(unit.holds(found->second.owners), "apply_plan: the plan has parameter '", fqn,
                  "' in the unit ", name_of(unit.fqn),
                  ", which does not hold every module that has it; put it into one that does");
    return found->second.slot;
  }

  /// A parameter in no unit would stay whole on each rank, and its gradient unreduced.
  void check_covered(const WrapPlan& plan) const {
    for (const auto& [fqn, parameter] : parameters_) {
      const bool ignored = std::ranges::any_of(plan, [&slot = parameter.slot](auto& unit) {
        return unit.options.ignored.contains(slot);
      });
      TESSERA_CHECK(ignored || taken_.contains(fqn),
                    "apply_plan: the plan has no unit for parameter '", fqn,
                    "'; put it into a unit that holds its module, or into the options' ignored");
    }
  }

  const ModuleTree& tree_;
  // By FQN.
  std::map<std::string, TreeParameter> parameters_;
  std::map<std::string, std::string> taken_;  ///< by which unit
  std::set<std::string> units_;
};

std::vector<ParameterChoice> choices_of(const Target& target, const DeviceMesh& mesh) {
  const Options& options = target.unit->options;
  return choose(target.parameters, data_mesh_of(mesh, options), options);
}

/// The plan's decisions on a unit, in a form that can be compared: functions cannot.
AppliedUnit applied_unit(const Target& target, const std::vector<ParameterChoice>& choices,
                         const DeviceMesh& mesh) {
  AppliedUnit applied{line_of(*target.unit), mesh, {}};
  for (std::size_t i = 0; i < choices.size(); ++i) {
    applied.parameters.push_back({target.unit->parameters[i], choices[i].placement,
                                  choices[i].mesh.all, choices[i].extension.has_value()});
  }
  return applied;
}

}  // namespace

void apply_plan(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan) {
  const ModuleTree tree = plannable_tree(root, "apply_plan");
  const std::vector<Target> targets = TargetFinder(tree).find(plan);
  std::vector<std::vector<ParameterChoice>> choices;
  AppliedUnits now;
  for (const Target& target : targets) {
    choices.push_back(choices_of(target, mesh));
    now.units.push_back(applied_unit(target, choices.back(), mesh));
    // Remembered, so that plannable_tree can look through these units when the plan is made again.
    now.modules.insert(target.module);
  }
  // Scripts that build a model and load it again apply the plan twice.
  if (const auto applied = root.attached<AppliedUnits>()) {
    check_same(applied->units, now.units);
    return;
  }
  // All are checked before any is made.
  std::vector<UnitSpec> specs;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Options& options = targets[i].unit->options;
    specs.push_back(checked_spec({targets[i].module}, targets[i].parameters, choices[i],
                                 data_mesh_of(mesh, options), options));
  }
  // Once for the whole plan, by the name from its root.
  warn_of_batch_norm(root, mesh.size());
  std::ranges::for_each(specs, make_unit);
  root.attach(std::make_shared<AppliedUnits>(std::move(now)));
}

void apply_plan(nn::ModuleBase& root, const comm::WorldPtr& world, const WrapPlan& plan) {
  apply_plan(root, world_mesh(world), plan);
}

}  // namespace tessera::fsdp

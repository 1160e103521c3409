#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "applied_plan.h"
#include "plan_table.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/policy.h"
#include "tree_parameters.h"
#include "unit.h"
#include "unit_parameters.h"

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
    TESSERA_CHECK(node != nullptr, "fully_shard: the plan has a unit ", name_of(unit.fqn),
                  ", but there is no such module without a unit; make the plan of "
                  "this module tree");
    TESSERA_CHECK(units_.insert(unit.fqn).second, "fully_shard: the plan has a unit ",
                  name_of(unit.fqn), " twice; leave one of them");
    Target target{&unit, node->module, {}};
    const std::size_t prefix = unit.fqn.empty() ? 0 : unit.fqn.size() + 1;
    for (const std::string& fqn : unit.parameters) {
      const nn::SlotPtr& slot = take(fqn, *node);
      target.parameters.emplace_back(fqn.substr(prefix), slot);
    }
    return target;
  }

  const nn::SlotPtr& take(const std::string& fqn, const ModuleTree::Node& unit) {
    const auto found = parameters_.find(fqn);
    TESSERA_CHECK(found != parameters_.end(), "fully_shard: the plan has a parameter '", fqn,
                  "', but the module tree has not; make the plan of this module tree");
    const auto [taken, is_first] = taken_.emplace(fqn, unit.fqn);
    TESSERA_CHECK(is_first, "fully_shard: the plan has parameter '", fqn, "' in two units, ",
                  name_of(taken->second), " and ", name_of(unit.fqn), "; leave it in one");
    TESSERA_CHECK(unit.holds(found->second.owners), "fully_shard: the plan has parameter '", fqn,
                  "' in the unit ", name_of(unit.fqn),
                  ", which does not hold every module that has it; put it into one that does");
    return found->second.slot;
  }

  void check_covered(const WrapPlan& plan) const {
    for (const auto& [fqn, parameter] : parameters_) {
      const bool ignored = std::ranges::any_of(plan, [&slot = parameter.slot](auto& unit) {
        return unit.options.ignored.contains(slot);
      });
      TESSERA_CHECK(ignored || taken_.contains(fqn),
                    "fully_shard: the plan has no unit for parameter '", fqn,
                    "'; put it into a unit that holds its module, or into the options' ignored");
    }
  }

  const ModuleTree& tree_;
  std::map<std::string, TreeParameter> parameters_;
  std::map<std::string, std::string> taken_;  ///< by which unit
  std::set<std::string> units_;
};

/// Where `tensor` will lie on the dimension that shards, however the function puts it.
Placement placement_of(const std::string& name, const at::Tensor& tensor,
                       const PlacementFunction& function) {
  if (tensor.dim() == 0) {
    return Replicate{};
  }
  Placement placement = (function ? function(name, tensor) : std::nullopt).value_or(Shard{0});
  if (auto* shard = std::get_if<Shard>(&placement); shard != nullptr && shard->dim < 0) {
    shard->dim += tensor.dim();
  }
  return placement;
}

DeviceMesh mesh_of(const std::string& name, const at::Tensor& tensor, const DeviceMesh& mesh,
                   const MeshFunction& function) {
  const std::optional<DeviceMesh> own = function ? function(name, tensor) : std::nullopt;
  return own ? DataMesh(*own).all : mesh;
}

AppliedUnit applied_unit(const Target& target, const DeviceMesh& mesh) {
  const Options& options = target.unit->options;
  AppliedUnit applied{line_of(*target.unit), mesh, {}};
  for (std::size_t i = 0; i < target.parameters.size(); ++i) {
    const auto& [name, slot] = target.parameters[i];
    const at::Tensor& tensor = slot->persistent();
    const auto& extension = options.all_gather_extension;
    applied.parameters.push_back({target.unit->parameters[i],
                                  placement_of(name, tensor, options.shard_placement),
                                  mesh_of(name, tensor, mesh, options.parameter_mesh),
                                  extension && extension(name, tensor).has_value()});
  }
  return applied;
}

}  // namespace

template <std::same_as<WrapPlan> Plan>
void fully_shard(nn::ModuleBase& root, const DeviceMesh& mesh, const Plan& plan) {
  const ModuleTree tree = plannable_tree(root, "fully_shard");
  const std::vector<Target> targets = TargetFinder(tree).find(plan);
  AppliedPlan now;
  for (const Target& target : targets) {
    now.units.push_back(applied_unit(target, mesh));
    now.modules.insert(target.module);
  }
  if (const auto applied = root.attached<AppliedPlan>()) {
    check_same(applied->units, now.units);
    return;
  }
  for (const Target& target : targets) {
    const Options& options = target.unit->options;
    check_parameters(target.parameters, data_mesh_of(mesh, options), options);
  }
  for (const Target& target : targets) {
    const Options& options = target.unit->options;
    make_unit({target.module}, target.parameters, data_mesh_of(mesh, options), options);
  }
  root.attach(std::make_shared<AppliedPlan>(std::move(now)));
}

template void fully_shard(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan);

}  // namespace tessera::fsdp

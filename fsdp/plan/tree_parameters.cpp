// The input of a plan: the modules and parameters of a tree that belong to no unit. Both
// plan_units, which makes a plan, and apply_plan, which finds its units again, read the tree here,
// so that they agree on names and on shared parameters.

#include "plan/tree_parameters.h"

#include <unordered_set>
#include <utility>

#include "plan/applied_units.h"
#include "tessera/core/error.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::fsdp {
namespace {

/// The FQNs of all modules that share a parameter: its unit must hold all of them.
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

}  // namespace

ModuleTree plannable_tree(const nn::ModuleBase& root, const char* asked) {
  const auto applied = root.attached<AppliedUnits>();
  // Units of this root's plan count as modules: the same policy then gives the same plan.
  ModuleTree tree(root, true, applied ? applied->modules : ModuleTree::Modules());
  TESSERA_CHECK(
      !tree.nodes().empty(), asked, ": this ", root.name(),
      " is a unit already, made by fully_shard or by the plan of a module that holds it; plan "
      "only modules that are none");
  return tree;
}

std::vector<TreeParameter> parameters_of(const ModuleTree& tree) {
  tree.nodes().back().module->named_slots();  // refuses modules whose parameters have no slots
  std::vector<TreeParameter> parameters;
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const ModuleTree::Node& node : tree.nodes()) {
    for (const auto& [name, slot] : node.module->slots()) {
      // The first FQN, in the tree's order, names a tied parameter, on every rank alike.
      if (seen.insert(slot.get()).second) {
        std::string fqn = nn::join_fqn(node.fqn, name);
        std::vector<std::string> owners = owners_of(*slot, fqn, tree);
        parameters.push_back({std::move(fqn), slot, std::move(owners)});
      }
    }
  }
  return parameters;
}

std::string name_of(const std::string& fqn) {
  return fqn.empty() ? "the root" : "'" + fqn + "'";
}

}  // namespace tessera::fsdp

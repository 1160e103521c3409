#include "tree_parameters.h"

#include <unordered_set>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

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

std::vector<TreeParameter> parameters_of(const ModuleTree& tree) {
  tree.nodes().back().module->named_slots();  // refuses modules whose parameters have no slots
  std::vector<TreeParameter> parameters;
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const ModuleTree::Node& node : tree.nodes()) {
    for (const auto& [name, slot] : node.module->slots()) {
      if (seen.insert(slot.get()).second) {
        std::string fqn = node.fqn.empty() ? name : node.fqn + "." + name;
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

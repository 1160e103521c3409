// If only parts of a model were made units, each rank trains the rest separately, without an error.
// Only the module whose forward was called can see the rest.

#include "unit/forgotten_parameters.h"

#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/core/error.h"
#include "unit/attached_units.h"

namespace tessera::fsdp {
namespace {

/// "'a', 'b', 'c', ...": three show which part of the model it is.
std::string first_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  return names.size() > 3 ? text + ", ..." : text;
}

}  // namespace

void refuse_forgotten_parameters(const nn::ModuleBase& module, const DataMesh& mesh) {
  if (mesh.ranks() == 1) {
    return;
  }
  std::unordered_set<nn::SlotPtr> meant;
  for (const std::shared_ptr<Unit>& unit : units_of(module, /*recurse=*/true)) {
    meant.insert(unit->ignored().begin(), unit->ignored().end());
  }
  std::vector<std::string> forgotten;
  nn::visit_modules(
      module,
      [&](const std::string& fqn, const nn::ModuleBase& outside) {
        for (const auto& [name, slot] : outside.slots()) {
          // A parameter with a persistent tensor is tied to one in a unit.
          if (slot->get().requires_grad() && !slot->has_persistent() && !meant.contains(slot)) {
            forgotten.push_back(nn::join_fqn(fqn, name));
          }
        }
      },
      outside_of_units());
  TESSERA_CHECK(forgotten.empty(), "forward of a ", module.name(), " with units of FSDP on ",
                mesh.ranks(), " ranks, but ", forgotten.size(),
                " of its parameters are in none, so that nobody would reduce their gradients (",
                first_of(forgotten), "); apply fully_shard or replicate to the ", module.name(),
                " as well, after its units; freeze them; or, where that is meant, name them in "
                "Options::ignored of a unit");
}

}  // namespace tessera::fsdp

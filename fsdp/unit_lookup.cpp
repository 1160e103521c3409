#include "unit_lookup.h"

#include "tessera/core/error.h"

namespace tessera::fsdp {

std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* asked) {
  std::shared_ptr<Unit> unit = module.attached<Unit>();
  TESSERA_CHECK(unit != nullptr, asked, ": this ", module.name(),
                " is not a unit; apply fully_shard to it first");
  return unit;
}

std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* asked) {
  std::vector<std::shared_ptr<Unit>> units = units_of(module, recurse);
  TESSERA_CHECK(!units.empty(), asked, ": this ", module.name(), recurse ? " holds" : " is",
                " no unit; apply fully_shard first");
  return units;
}

}  // namespace tessera::fsdp

#include "tessera/fsdp/fully_shard.h"

#include "tessera/core/error.h"
#include "tessera/nn/containers.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* asked) {
  std::shared_ptr<Unit> unit = module.attached<Unit>();
  TESSERA_CHECK(unit != nullptr, asked, ": this ", module.name(),
                " is not a unit; apply fully_shard to it first");
  return unit;
}

}  // namespace

void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options) {
  TESSERA_CHECK(mesh && mesh.ndim() == 1, "fully_shard: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass one dimension of it, for example mesh[\"dp\"]");
  TESSERA_CHECK(!is_fully_sharded(module), "fully_shard was applied to this ", module.name(),
                " already; apply it once to each module");
  TESSERA_CHECK(
      dynamic_cast<const nn::ModuleList*>(&module) == nullptr,
      "fully_shard: a ModuleList has no forward to gather before; apply it to the modules "
      "in it");
  const auto unit = std::make_shared<Unit>(module, mesh, options);
  unit->install();
  module.attach(unit);
}

bool is_fully_sharded(const nn::ModuleBase& module) {
  return module.attached<Unit>() != nullptr;
}

void unshard(nn::ModuleBase& module) {
  unit_of(module, "unshard")->unshard();
}

void reshard(nn::ModuleBase& module) {
  unit_of(module, "reshard")->reshard();
}

}  // namespace tessera::fsdp

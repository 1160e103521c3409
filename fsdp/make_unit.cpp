// Units on the modules that they are made of.
#include <algorithm>
#include <utility>

#include "device_moves.h"
#include "tessera/nn/kept_gradients.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

void collect_units(const torch::nn::Module& module, bool recurse,
                   std::vector<std::shared_ptr<Unit>>& units) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    auto unit = ours->attached<Unit>();
    if (unit != nullptr && std::ranges::find(units, unit) == units.end()) {
      units.push_back(std::move(unit));
    }
  }
  for (const auto& child : module.children()) {
    if (recurse) {
      collect_units(*child, recurse, units);
    }
  }
}

/// Lets an optimizer's zero_grad reach what a unit has accumulated.
class KeptByUnit final : public nn::KeptGradients {
 public:
  explicit KeptByUnit(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}

  void drop(const nn::ParameterSlot& slot) override {
    if (const std::shared_ptr<Unit> unit = unit_.lock()) {
      unit->drop_kept_gradient(slot);
    }
  }

 private:
  std::weak_ptr<Unit> unit_;
};

}  // namespace

std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse) {
  std::vector<std::shared_ptr<Unit>> units;
  collect_units(module, recurse, units);
  return units;
}

void make_unit(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
               const DataMesh& mesh, const Options& options) {
  move_buffers(modules, mesh.device(), options.ignored);
  const auto unit = std::make_shared<Unit>(modules, parameters, mesh, options);
  unit->install();
  for (nn::ModuleBase* module : modules) {
    module->attach(unit);
  }
  const std::shared_ptr<nn::KeptGradients> kept = std::make_shared<KeptByUnit>(unit);
  for (const auto& [name, slot] : parameters) {
    for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
      owner.module->attach(kept);
    }
  }
}

}  // namespace tessera::fsdp

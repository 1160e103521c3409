// Attaches units to modules by type (ModuleBase::attach): the module owns its unit, and there is no
// table of units. Units are made, attached, and found again here.

#include "unit/attached_units.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/detail/call_context.h"
#include "tessera/nn/detail/slot_keeper.h"
#include "unit/boundary.h"
#include "unit/requested_gradients.h"

namespace tessera::fsdp {
namespace {

/// Identifies a parameter by its unsharded tensor, for other code.
class KeptByUnit final : public nn::SlotKeeper {
 public:
  explicit KeptByUnit(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}

  bool is_unsharded(const nn::ParameterSlot& slot, const at::Tensor& tensor) const override {
    const std::shared_ptr<Unit> unit = unit_.lock();
    return unit != nullptr && unit->parameters().is_unsharded(slot, tensor);
  }

  bool brought_nonfinite(const nn::ParameterSlot& slot) const override {
    const std::shared_ptr<Unit> unit = unit_.lock();
    return unit != nullptr && std::ranges::any_of(unit->groups(), [&](const ParameterGroup& group) {
             return group.gradients().brought_nonfinite(slot);
           });
  }

 private:
  // Weak: a module below the unit's may outlive it.
  std::weak_ptr<Unit> unit_;
};

}  // namespace

std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse) {
  std::vector<std::shared_ptr<Unit>> units;
  const auto add = [&units](const std::string&, const nn::ModuleBase& each) {
    auto unit = each.attached<Unit>();
    // A unit of several modules is met several times.
    if (unit != nullptr && std::ranges::find(units, unit) == units.end()) {
      units.push_back(std::move(unit));
    }
  };
  recurse ? nn::visit_modules(module, add) : add("", module);
  return units;
}

nn::ModuleWalk outside_of_units() {
  return {.skip = [](const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module);
    return ours != nullptr && ours->attached<Unit>() != nullptr;
  }};
}

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

void make_unit(const UnitSpec& spec) {
  // First: after an error here nothing has been sharded.
  move_buffers(spec.modules, spec.mesh.device(), spec.options.ignored);
  const auto unit = std::make_shared<Unit>(spec);
  unit->install();
  offer_gradients(unit);
  const auto context = std::make_shared<nn::detail::CallContext>(
      nn::detail::CallContext{[unit = std::weak_ptr(unit)] { return unit.lock()->label(); }});
  for (nn::ModuleBase* module : spec.modules) {
    module->attach(unit);
    module->attach(context);
  }
  const std::shared_ptr<nn::SlotKeeper> kept = std::make_shared<KeptByUnit>(unit);
  for (const ParameterSpec& parameter : spec.parameters) {
    // Attached to the owners, because callers know slots and not units.
    for (const nn::ParameterSlot::Owner& owner : parameter.slot->owners()) {
      owner.module->attach(kept);
    }
  }
}

}  // namespace tessera::fsdp

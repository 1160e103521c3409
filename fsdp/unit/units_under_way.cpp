#include "tessera/fsdp/detail/units_under_way.h"

#include "unit/attached_units.h"

namespace tessera::fsdp {

UnitsUnderWay::UnitsUnderWay(const nn::ModuleBase& model)
    : units_(units_of(model, /*recurse=*/true)) {}

std::string UnitsUnderWay::text() const {
  const Unit* inner = nullptr;
  for (const std::shared_ptr<Unit>& unit : units_) {  // innermost last
    const UnitPhase phase = unit->phase();
    if (phase == UnitPhase::kBackward || phase == UnitPhase::kForward ||
        phase == UnitPhase::kForwardRecorded) {
      inner = unit.get();
    }
  }
  if (inner == nullptr) {
    return "";
  }
  const bool backward = inner->phase() == UnitPhase::kBackward;
  return (backward ? "the backward of " : "the forward of ") + inner->label();
}

}  // namespace tessera::fsdp

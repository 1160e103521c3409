// place_parameters: a module's own parameters, and nothing else.

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// Without hooks, so that it also fits modules that are never called directly.
class PlaceParameters final : public ParallelStyle {
 public:
  explicit PlaceParameters(PlaceOptions options) : options_(std::move(options)) {}

  std::string name() const override { return "place_parameters"; }
  bool adds_hooks() const override { return false; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    TESSERA_CHECK(!module.slots().empty(), name(), " was asked for a ", module.name(),
                  ", which has no own parameters; name the modules below it that have");
    for (const auto& [parameter, placement] : options_.placements) {
      module.slot(parameter);  // throws for a name that the module has not
    }
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [parameter, slot] : module.slots()) {
      placements.emplace_back(slot, placement_of(parameter));
    }
    return placements;
  }

  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}

 private:
  Placement placement_of(const std::string& parameter) const {
    const auto found = std::ranges::find(options_.placements, parameter,
                                         &std::pair<std::string, Placement>::first);
    return found == options_.placements.end() ? Placement(Replicate{}) : found->second;
  }

  PlaceOptions options_;
};

}  // namespace

StylePtr place_parameters(PlaceOptions options) {
  return std::make_shared<PlaceParameters>(std::move(options));
}

}  // namespace tessera::tensor_parallel

// The style of modules that tensor parallelism leaves alone, by intention.

#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

/// Only says that nothing was forgotten.
class LeavePlain final : public ParallelStyle {
 public:
  std::string name() const override { return "leave_plain"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  std::vector<nn::SlotPtr> plain_parameters(const nn::ModuleBase& module) const override {
    std::vector<nn::SlotPtr> slots;
    for (const auto& [name, slot] : module.named_slots()) {
      slots.push_back(slot);
    }
    return slots;
  }

  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}
};

}  // namespace

StylePtr leave_plain() {
  return std::make_shared<LeavePlain>();
}

}  // namespace tessera::tensor_parallel

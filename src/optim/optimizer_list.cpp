#include "tessera/optim/optimizer_list.h"

#include <unordered_set>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

OptimizerList::OptimizerList(std::vector<std::shared_ptr<Optimizer>> optimizers)
    : optimizers_(std::move(optimizers)) {
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const auto& optimizer : optimizers_) {
    for (const nn::SlotPtr& slot : optimizer->parameters()) {
      TESSERA_CHECK(seen.insert(slot.get()).second, "a parameter of sizes ",
                    slot->persistent().sizes(),
                    " was given to two optimizers of a list; give it to one of them");
      parameters_.push_back(slot);
    }
  }
}

void OptimizerList::update(double gradient_factor) {
  for (const auto& optimizer : optimizers_) optimizer->step(gradient_factor);
}

void OptimizerList::scale_lr(double factor) {
  for (const auto& optimizer : optimizers_) optimizer->scale_lr(factor);
}

std::vector<StateTensor> OptimizerList::state() {
  std::vector<StateTensor> all;
  for (const auto& optimizer : optimizers_) {
    for (StateTensor& state : optimizer->state()) all.push_back(std::move(state));
  }
  return all;
}

}  // namespace tessera::optim

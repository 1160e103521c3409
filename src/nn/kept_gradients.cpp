#include "tessera/nn/kept_gradients.h"

#include "tessera/nn/module.h"

namespace tessera::nn {

void drop_gradient(const ParameterSlot& slot) {
  slot.persistent().mutable_grad().reset();
  slot.get().mutable_grad().reset();
  for (const ParameterSlot::Owner& owner : slot.owners()) {
    if (const auto kept = owner.module->attached<KeptGradients>()) {
      kept->drop(slot);
    }
  }
}

}  // namespace tessera::nn

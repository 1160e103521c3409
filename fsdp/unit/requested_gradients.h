#pragma once

#include <memory>

#include "unit/unit.h"

namespace tessera::fsdp {

/// Lets autograd::grad and a backward with inputs find the parameters of `unit`, though forward
/// computes with others: they get the gradients of the shards.
void offer_gradients(const std::shared_ptr<Unit>& unit);

}  // namespace tessera::fsdp

#pragma once

#include <cstdint>

#include "tessera/export.h"
#include "tessera/nn/module.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// All that training changes. A Checkpointer saves it, and fills it again.
///
///   training::TrainState state{*model, optimizer};
struct TrainState {
  nn::ModuleBase& model;
  optim::Optimizer& optimizer;
  /// The loss scaling of fp16; off by default.
  optim::GradScaler scaler = optim::GradScaler({.enabled = false});
  std::int64_t step = 0;     ///< optimizer steps that are done
  std::int64_t samples = 0;  ///< what they have taken of the data, on all ranks together
};

}  // namespace tessera::training
TESSERA_API_END

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// When a run looks at held-out data.
struct EvaluationOptions {
  std::int64_t every = 0;  ///< steps; 0: not between the steps
  std::int64_t steps = 0;  ///< of the whole run: the last one is evaluated, too
  bool is_due(std::int64_t step) const { return every > 0 && (step % every == 0 || step == steps); }
};

/// The mean loss of held-out batches 0 to `batches` - 1, without gradients and with the model in
/// eval mode; afterwards the model is as it was. `loss`: of this rank's part of a batch, a plain
/// scalar. `stop`: asked after each batch, the same on all ranks, as stop_requested(); nullopt if
/// it says so. Collective as `loss` and over `data_mesh`, as step() takes it. Throws Error for no
/// batch.
std::optional<double> evaluate(nn::ModuleBase& model, const DeviceMesh& data_mesh,
                               std::int64_t batches,
                               const std::function<at::Tensor(std::int64_t batch)>& loss,
                               const std::function<bool()>& stop = {});

/// Runs `body` with the averages of an optim::Ema as the weights, and with the weights as they are
/// where the optimizer is another. Also where `body` throws, the weights are back afterwards.
void with_averaged_weights(optim::Optimizer& optimizer, const std::function<void()>& body);

}  // namespace tessera::training
TESSERA_API_END

#pragma once

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"
#include "tessera/observe/flops.h"

namespace llama {

/// FLOPs a token of a training step. Where --freeze or --lora-rank leaves weights untrained,
/// without those of gradients that no step needs: of the weights themselves, and of all that lies
/// before the first trained one.
tessera::observe::ModelFlops flops_of(const TrainOptions& options, const Config& config);

}  // namespace llama

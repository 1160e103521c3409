// What the checkpoints of llama_train say beside tensors: their data, model and flags.

#pragma once

#include <nlohmann/json_fwd.hpp>

#include "examples/llama/train/llama_run.h"
#include "tessera/training/checkpointer.h"

namespace llama {

/// To be saved with each step. Reads a part of each data file.
nlohmann::json checkpoint_entries(const LlamaRun& run);

/// Fills the run's state. Throws tessera::Error where the checkpoint's data, model or flags of
/// fine-tuning are not those of the run, as its `entries` say. Collective.
void load_checkpoint(LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     const nlohmann::json& entries);

}  // namespace llama

// What a run prints and writes: its first lines, the exports and the report.

#pragma once

#include <optional>

#include "examples/llama/train/llama_run.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/metric_log.h"

namespace llama {

/// Makes or checks all that the run will write: better to learn before the training than after it
/// that its result can't be written. Collective; a failure on rank 0 is an error on all.
void prepare_outputs(const LlamaRun& run, tessera::training::Checkpointer& checkpoints,
                     tessera::training::MetricLog& log);

/// The mesh, the model, and the step that the run goes on from.
void print_start(const LlamaRun& run, const tessera::training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops);

/// --save-lora, --merge-lora and --save-hf. Collective.
void export_weights(LlamaRun& run);

/// report.html of --metrics.
void write_report(const LlamaRun& run, const tessera::training::MetricLog& log);

}  // namespace llama

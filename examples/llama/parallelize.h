#pragma once

#include "examples/llama/model.h"

namespace llama {

struct ParallelOptions {
  bool sequence_parallel = true;
  bool loss_parallel = true;
  tessera::fsdp::MixedPrecisionPolicy mp_policy;
};

/// Splits the model over a 2-D mesh ("dp", "tp"): tensor (and sequence) parallelism over tp where
/// it has more than one rank, then one FSDP unit a block and one for the rest over dp. The last
/// block and the root keep their parameters between forward and backward. Logits come out sharded
/// on the vocabulary with loss_parallel, else whole. Not collective.
void parallelize(Llama& model, const tessera::DeviceMesh& mesh, const ParallelOptions& options);

/// The tensor-parallel plan by itself.
tessera::tensor_parallel::Plan tensor_parallel_plan(const ParallelOptions& options);

}  // namespace llama

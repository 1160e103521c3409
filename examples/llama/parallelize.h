#pragma once

#include "examples/llama/model.h"

namespace llama {

/// What backward finds of a block's forward.
enum class ActivationMemory {
  kAll,      ///< all that it needs
  kMatmuls,  ///< results of attention and half of the matrix multiplications; the rest is computed
             ///< again
  kInputs,   ///< the block's input; everything is computed again
};

struct ParallelOptions {
  bool sequence_parallel = true;
  bool loss_parallel = true;
  /// Of every FSDP unit. reshard_after_forward (true by default: ZeRO-3) is of the blocks; the last
  /// one and the root, which backward needs first, stay gathered.
  tessera::fsdp::Options fsdp{};
  ActivationMemory activations = ActivationMemory::kAll;
};

/// The dimensions of a mesh whose ranks hold different data: "dp", and "dp_replicate" where it has
/// one.
tessera::DeviceMesh data_mesh(const tessera::DeviceMesh& mesh);

/// Splits the model over a mesh ("dp", "tp") or ("dp_replicate", "dp", "tp"): tensor (and sequence)
/// parallelism over tp where it has more than one rank, then activation checkpointing of the
/// blocks, then one FSDP unit a block and one for the rest over dp, all-reduced over dp_replicate.
/// Logits come out sharded on the vocabulary with loss_parallel, else whole. Not collective.
void parallelize(Llama& model, const tessera::DeviceMesh& mesh, const ParallelOptions& options);

/// The tensor-parallel plan by itself.
tessera::tensor_parallel::Plan tensor_parallel_plan(const ParallelOptions& options);

}  // namespace llama

// The example's centre: all that makes a Llama parallel, applied to a model that knows nothing of
// it.

#pragma once

#include <cstdint>
#include <functional>

#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/llama.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The activations of a block that are kept for backward.
enum class ActivationMemory {
  kAll,      ///< all that backward needs
  kMatmuls,  ///< results of attention and half of the matrix multiplications; recomputes the rest
  kInputs,   ///< the block's input; recomputes everything
};

/// What applies a plan over the 1-D mesh of tensor parallelism, where the plan is empty if it has
/// one rank.
using ApplyPlan = std::function<void(nn::ModuleBase& model, const DeviceMesh& mesh,
                                     const tensor_parallel::ParallelizePlan& plan)>;

struct ParallelOptions {
  bool sequence_parallel = true;
  bool loss_parallel = true;
  /// With sequence parallelism blocks keep their split inputs for backward, and gather them again
  /// (ColwiseOptions::regather). Without `activations` kAll they are computed again anyway.
  bool regather = true;
  /// Also the last block, final norm and head, which backward needs first, are freed after forward
  /// if `fsdp` says so, and gathered again.
  bool reshard_last = false;
  /// For every FSDP unit. reshard_after_forward (default true: ZeRO-3) is for the embedding and all
  /// blocks but the last. The last block, final norm and head stay gathered without `reshard_last`.
  fsdp::Options fsdp{};
  ActivationMemory activations = ActivationMemory::kAll;
  /// Instead of tensor_parallel::parallelize_module, for who records what a plan does.
  ApplyPlan apply_plan{};
};

/// The submesh whose ranks hold different sequences: "dp", with "dp_replicate" if the mesh has it.
DeviceMesh batch_mesh(const DeviceMesh& mesh);
/// The submesh whose ranks hold different tokens: batch_mesh(), with "cp" flattened into "dp_cp" if
/// the mesh has it.
DeviceMesh data_mesh(const DeviceMesh& mesh);

/// Parallelizes the model over a mesh ("dp", "tp"), with "dp_replicate" in front of these and "cp"
/// between them, or without: first tensor and sequence parallelism over tp, if it has more than one
/// rank; then context parallelism over cp; then activation checkpointing of the blocks; then FSDP
/// over dp and cp, with the units of Llama::fsdp_units(), whose gradients are all-reduced over
/// dp_replicate. Logits are sharded on the vocabulary with loss_parallel, else replicated. Not
/// collective.
void parallelize(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options);

/// Of parallelize() the tensor and sequence parallelism alone, over the 1-D `mesh`: nothing where
/// it has one rank. Not collective.
void apply_tensor_parallel(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options);

}  // namespace tessera::models
TESSERA_API_END

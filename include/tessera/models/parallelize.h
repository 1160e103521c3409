// Tensor, context and data parallelism and activation checkpointing in one call, for any model that
// declares its blocks and units (DeclaresUnits) and its plan (tensor_parallel::DeclaresPlan).

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The declarations of a model for parallelize().
class DeclaresUnits {
 public:
  virtual ~DeclaresUnits() = default;
  /// The modules that activation checkpointing recomputes, each at once, in the order of forward.
  virtual std::vector<nn::ModuleBase*> blocks() const = 0;
  /// The modules of each FSDP unit, in the order for fully_shard. Each block is one, and the model,
  /// which has the parameters of no other unit, comes last.
  virtual std::vector<std::vector<nn::ModuleBase*>> fsdp_units() = 0;
  /// From now on sequences are split over the ranks of the 1-D `mesh`. Throws Error unless the
  /// model overrides it.
  virtual void set_context_parallel(const DeviceMesh& mesh);
};

/// The activations of a block that are saved for backward.
enum class ActivationMemory {
  kAll,      ///< all that backward needs
  kMatmuls,  ///< results of attention and half of the matrix multiplications; recomputes the rest
  kInputs,   ///< the block's input; recomputes everything
};

/// Options of parallelize().
struct ParallelOptions {
  bool sequence_parallel = true;
  bool loss_parallel = true;
  /// With sequence parallelism blocks save their split inputs for backward, and gather them again
  /// (ColwiseOptions::regather). Needs `activations` kAll; otherwise they are recomputed.
  bool regather = true;
  /// If `fsdp` frees units after forward: whether the last block and the units after it, which
  /// backward needs first, are freed, too.
  bool reshard_last = false;
  /// For every FSDP unit. reshard_after_forward (default true: ZeRO-3) is for the units before the
  /// last block. It and those after it stay gathered without `reshard_last`.
  fsdp::Options fsdp{};
  ActivationMemory activations = ActivationMemory::kAll;
};

/// The submesh whose ranks hold different sequences: "dp", with "dp_replicate" if the mesh has it.
DeviceMesh batch_mesh(const DeviceMesh& mesh);
/// The submesh whose ranks hold different tokens: batch_mesh(), with "cp" flattened into "dp_cp" if
/// the mesh has it.
DeviceMesh data_mesh(const DeviceMesh& mesh);

/// Parallelizes the model over a mesh ("dp", "tp"), with "dp_replicate" in front of these and "cp"
/// between them, or without: first tensor and sequence parallelism over tp, by the plan that the
/// model declares, if tp has more than one rank; then context parallelism over cp; then activation
/// checkpointing of the blocks; then FSDP over dp and cp, whose gradients are all-reduced over
/// dp_replicate. A unit of nothing but embeddings is not gathered for backward. Throws Error for a
/// model that is no DeclaresUnits, and what the parts throw. Not collective.
void parallelize(nn::ModuleBase& model, const DeviceMesh& mesh, const ParallelOptions& options);

/// The tensor and sequence parallelism of parallelize() alone, over the 1-D `mesh`: nothing where
/// it has one rank. Not collective.
void apply_tensor_parallel(nn::ModuleBase& model, const DeviceMesh& mesh,
                           const ParallelOptions& options);

}  // namespace tessera::models
TESSERA_API_END

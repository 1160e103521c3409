// Applies tensor, context and data parallelism and activation checkpointing in one call, for any
// model that declares its blocks and units (DeclaresUnits) and its tensor-parallel plan
// (tensor_parallel::DeclaresPlan).

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The declarations that parallelize() needs from a model.
class DeclaresUnits {
 public:
  virtual ~DeclaresUnits() = default;
  /// The modules that activation checkpointing recomputes, one at a time, in the order of forward.
  virtual std::vector<nn::ModuleBase*> blocks() const = 0;
  /// The modules of each FSDP unit, in the order of the calls to fully_shard(). Each block is one
  /// unit. The last unit is the model itself, with the remaining parameters.
  virtual std::vector<std::vector<nn::ModuleBase*>> fsdp_units() = 0;
  /// Splits sequences over the ranks of the 1-D `mesh` in all later forwards (context parallelism).
  /// The default implementation throws Error.
  virtual void set_context_parallel(const DeviceMesh& mesh);
};

/// Which activations of a block are saved for backward.
enum class ActivationMemory {
  kAll,      ///< all activations that backward needs are saved
  kMatmuls,  ///< attention and half of the matrix products are saved, not recomputed
  kInputs,   ///< only the block's input is saved; all other activations are recomputed
};

/// The options of parallelize().
struct ParallelOptions {
  bool sequence_parallel = true;
  bool loss_parallel = true;
  /// Whether backward reduces the gradients of a block's gathered inputs while it computes weight
  /// gradients (sequence parallelism; ColwiseOptions::regather). With `activations` kAll, backward
  /// gathers the inputs again, instead of saving the gathered inputs in forward.
  bool regather = true;
  /// Whether FSDP reshards the last block and later units after forward. Backward begins with these
  /// units, so resharding costs a second all-gather.
  bool reshard_last = false;
  /// Options for every FSDP unit. reshard_after_forward (default true: ZeRO-3) applies to the units
  /// before the last block. Without `reshard_last`, the last block and later units remain gathered.
  fsdp::Options fsdp{};
  ActivationMemory activations = ActivationMemory::kAll;
  /// The number of blocks, counted from the first, to which `activations` applies; nullopt: all
  /// blocks. Later blocks save all activations. Like Megatron-LM's --recompute-num-layers.
  std::optional<std::int64_t> recomputed_blocks{};
};

/// Returns the submesh whose ranks have different sequences: the dimensions "dp_replicate", "dp"
/// and "ep". Dimensions that the mesh lacks are left out.
DeviceMesh batch_mesh(const DeviceMesh& mesh);
/// Returns the submesh whose ranks have different tokens: "dp_replicate", then "dp", "ep" and "cp"
/// flattened to one dimension. Dimensions that the mesh lacks are left out.
DeviceMesh data_mesh(const DeviceMesh& mesh);

/// Parallelizes the model over a mesh ("dp", "tp"), optionally with "dp_replicate" in front, and
/// "ep" and "cp" before "tp". The steps, in order:
/// 1. tensor and sequence parallelism over tp, if tp > 1, by the plan that the model declares
/// 2. context parallelism over cp; expert parallelism over ep or, without ep, over tp
/// 3. activation checkpointing of the blocks
/// 4. FSDP over dp, ep and cp (experts: over dp and cp); dp_replicate all-reduces gradients
/// Not collective. Throws Error for a model that does not implement DeclaresUnits, and as the steps
/// do.
void parallelize(nn::ModuleBase& model, const DeviceMesh& mesh, const ParallelOptions& options);

/// Does only step 1 of parallelize(), over the 1-D `mesh`, and splits experts over `mesh`. Does
/// nothing if `mesh` has one rank. Not collective.
void apply_tensor_parallel(nn::ModuleBase& model, const DeviceMesh& mesh,
                           const ParallelOptions& options);

}  // namespace tessera::models
TESSERA_API_END

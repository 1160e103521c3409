#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

// In-memory state dicts, like torch.distributed.checkpoint.state_dict. The functions work before or
// after TP and FSDP are applied, before any forward, and before the optimizer's first step.

/// Tensors by name. A tied parameter appears under each of its FQNs; a fused parameter
/// (nn::FusedLinear) appears under its own FQN, not as its parts.
using TensorDict = std::map<std::string, at::Tensor>;

/// Options of state dicts, like PyTorch's class StateDictOptions.
struct StateDictOptions {
  /// Whether the state dict has whole tensors instead of shards.
  bool full_state_dict = false;
  /// Whether to copy the tensors to CPU memory. With full_state_dict, rank 0 gets the tensors, and
  /// the other ranks get an empty dict.
  bool cpu_offload = false;
  /// Whether to leave out parameters that do not require gradients, and the optimizer state of
  /// these parameters.
  bool ignore_frozen_params = false;
  /// For set_model_state_dict() and set_optimizer_state_dict(): whether missing or unexpected names
  /// throw Error.
  bool strict = true;
  /// Whether set_model_state_dict() and set_optimizer_state_dict() use only the tensors of rank 0.
  /// For use with full_state_dict. Tensors are sent in blocks of rows of at most 32 MiB (at least
  /// one row).
  bool broadcast_from_rank0 = false;
};

/// The result of comparing the names in a state dict with the names in the model or optimizer.
struct IncompatibleKeys {
  std::vector<std::string> missing;  ///< names that only the model or optimizer has
  /// Names that only the state dict has.
  std::vector<std::string> unexpected;
};

/// Returns the parameters and persistent buffers of `model`. Shards share the model's memory unless
/// cpu_offload is set. Collective over `world`. Throws Error, on all ranks, if a parameter differs
/// between ranks, or is uninitialized with full_state_dict or cpu_offload.
TensorDict get_model_state_dict(comm::World& world, const nn::ModuleBase& model,
                                const StateDictOptions& options = {});
/// Copies `state` into the model. Floating-point dtypes are converted. Collective over `world`.
/// Throws Error, on all ranks and before anything is changed, if names (with options.strict),
/// sizes, dtypes or shards do not fit.
IncompatibleKeys set_model_state_dict(comm::World& world, nn::ModuleBase& model,
                                      const TensorDict& state,
                                      const StateDictOptions& options = {});

/// Returns the optimizer state of optim::named_state(), under names such as "FQN.exp_avg".
/// Otherwise the same as get_model_state_dict().
TensorDict get_optimizer_state_dict(
    comm::World& world, const nn::ModuleBase& model,
    const std::vector<std::pair<std::string, at::Tensor>>& named_state,
    const StateDictOptions& options = {});
/// Copies the values of `state` into the optimizer state that optim::named_state() returns.
/// Otherwise the same as set_model_state_dict().
IncompatibleKeys set_optimizer_state_dict(
    comm::World& world, const nn::ModuleBase& model,
    const std::vector<std::pair<std::string, at::Tensor>>& named_state, const TensorDict& state,
    const StateDictOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END

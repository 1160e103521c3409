#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/stateful.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

// State dicts in memory, as those of torch.distributed.checkpoint.state_dict: before or after TP
// and FSDP are applied, before any forward and before the optimizer has stepped.

/// Tensors by name. A tied parameter is there under each of its FQNs; a fused one (nn::FusedLinear)
/// under its own.
using TensorDict = std::map<std::string, at::Tensor>;
/// What optim::named_state() gives.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// PyTorch's.
struct StateDictOptions {
  /// Whole tensors instead of shards.
  bool full_state_dict = false;
  /// Copies on the host. With full_state_dict rank 0 alone has them; the others get an empty dict,
  /// and of a sharded tensor no rank but 0 receives anything.
  bool cpu_offload = false;
  /// Leave out parameters that need no gradient, and the optimizer's state of them.
  bool ignore_frozen_params = false;
  /// set_...: names that are missing or unexpected are an Error.
  bool strict = true;
  /// set_..., with full_state_dict: uses the tensors of rank 0 and ignores those of other ranks.
  /// They are sent at most 32 MiB, or a row, at a time.
  bool broadcast_from_rank0 = false;
};

/// Names that differ between a state dict and the module or optimizer.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< from the state dict
  std::vector<std::string> unexpected;  ///< in it
};

/// The parameters. Shards share their memory unless cpu_offload is set. Collective over `world`.
/// Throws Error, on all ranks, for requested values that were never filled, and for parameters that
/// differ between ranks.
TensorDict get_model_state_dict(comm::World& world, const nn::ModuleBase& model,
                                const StateDictOptions& options = {});
/// Copies the values in; floating-point types are converted. A tied parameter needs one of its
/// names. Collective over `world`. Throws Error, on all ranks and before anything is changed, for
/// names (options.strict), sizes, types or shards that do not fit.
IncompatibleKeys set_model_state_dict(comm::World& world, nn::ModuleBase& model,
                                      const TensorDict& state,
                                      const StateDictOptions& options = {});

/// get_model_state_dict() for an optimizer: for what optim::named_state() gives, by its names,
/// "FQN.exp_avg".
TensorDict get_optimizer_state_dict(comm::World& world, const nn::ModuleBase& model,
                                    const NamedTensors& named_state,
                                    const StateDictOptions& options = {});
/// set_model_state_dict() for an optimizer, likewise.
IncompatibleKeys set_optimizer_state_dict(comm::World& world, const nn::ModuleBase& model,
                                          const NamedTensors& named_state, const TensorDict& state,
                                          const StateDictOptions& options = {});

/// The states of objects of each rank's own, by name: this rank's; or, with full_state_dict, one in
/// place of all ranks' (RankState::merged), with cpu_offload on rank 0 alone. The objects stay as
/// they are. Collective over `world`.
nlohmann::json get_rank_state_dict(comm::World& world, const NamedRankStates& objects,
                                   const StateDictOptions& options = {});
/// Sets the states: with full_state_dict from rank 0's dict, on rank 0, and resets the other ranks'
/// objects. States that the dict lacks are reset on all ranks. Collective over `world`. Throws
/// Error, on all ranks, for a state that an object cannot take.
void set_rank_state_dict(comm::World& world, const NamedRankStates& objects,
                         const nlohmann::json& states, const StateDictOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END

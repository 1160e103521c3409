#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Freezes the parameters with an FQN that matches one of the patterns (see matches_fqn): they get
/// no gradient and no state of an optimizer, FSDP reduces nothing for them, and checkpoints hold
/// them. A tied parameter may be named by any of its FQNs. To be called before or after
/// parallelize_module and fully_shard, but not between a forward and its backward.
///
/// Not collective; freeze the same on every rank. Throws Error, before anything is changed, for a
/// pattern that matches no parameter.
void freeze(ModuleBase& module, const std::vector<std::string>& patterns);

/// Makes one parameter trainable or not.
void set_trainable(ParameterSlot& slot, bool trainable);

}  // namespace tessera::nn
TESSERA_API_END

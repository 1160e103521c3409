#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Freezes the parameters whose FQN matches one of the patterns (see matches_fqn). A frozen
/// parameter gets no gradient and no optimizer state, and FSDP does not reduce its gradient. Saved
/// checkpoints contain frozen parameters too. A tied parameter is frozen if any of its FQNs
/// matches. Call freeze() before or after parallelize_module and fully_shard, but not between a
/// forward and its backward.
///
/// Not collective; every rank must freeze the same parameters. Throws Error, before anything is
/// changed, for a pattern that matches no parameter.
void freeze(ModuleBase& module, const std::vector<std::string>& patterns);

}  // namespace tessera::nn
TESSERA_API_END

// The masks of nn::Dropout depend on the number of its calls: without the counts a resumed run
// would draw the masks of its first steps again.

#pragma once

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// nn::Dropout::calls() of each in a module, by FQN; an empty object where there is none.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Sets the counts to those from dropout_calls(). Counts that `saved` lacks, as older checkpoints
/// do, or that are excluded do not change.
void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options);

}  // namespace tessera::checkpoint

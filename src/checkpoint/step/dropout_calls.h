// The masks of nn::Dropout are counted by calls: without the counts a run that goes on would draw
// the masks of its first steps again.

#pragma once

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// nn::Dropout::calls() of each in a module, by FQN; an empty object where there is none.
nlohmann::json dropout_calls(const nn::ModuleBase& module);

/// Sets them to what dropout_calls() returned. Those that `saved` lacks, or that are excluded, stay
/// as they are: older checkpoints have none.
void set_dropout_calls(nn::ModuleBase& module, const nlohmann::json& saved,
                       const LoadOptions& options);

}  // namespace tessera::checkpoint

#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

// Copies of parameters as they persist: each rank copies its own shards, nothing is communicated
// and no gradient is recorded. For an average of the weights (EMA), a reference model, a way back.
// Not to be called between a forward and its backward.

/// A copy of every parameter below `module`, by FQN, with its layout, in separate memory and
/// without a gradient.
std::vector<std::pair<std::string, at::Tensor>> clone_parameters(const nn::ModuleBase& module);

/// Copies the values of `from` to `to`, another module of the same class and sizes, wrapped in the
/// same way. Frees gathered parameters of `to`. Throws Error, before anything is written, where a
/// parameter is missing or has another layout.
void copy_parameters(const nn::ModuleBase& from, nn::ModuleBase& to);

/// average = decay * average + (1 - decay) * module, of all floating-point parameters; others are
/// copied. Otherwise as copy_parameters; throws Error for a decay outside [0, 1] as well. Call it
/// after the optimizer's step.
void average_parameters(nn::ModuleBase& average, const nn::ModuleBase& module, double decay);

}  // namespace tessera::fsdp
TESSERA_API_END

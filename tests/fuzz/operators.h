#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::fuzz {

// x * sigmoid(x) as four operators that a user could have defined, each with a rule but the last.

at::Tensor call_operator(const std::string& name, const at::Tensor& x);

/// Gives the operators their sharding rules. Once in a process.
void register_operator_rules();

}  // namespace tessera::fuzz

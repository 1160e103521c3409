#pragma once

#include <string>

namespace tessera::tensor_parallel {

// Shared by messages and tables about plans.

/// "'layers.0.q_proj'"; "the root module" for "".
std::string quoted(const std::string& fqn);

/// `fqn` for all layers: "layers.3.attn.q_norm" becomes "layers.*.attn.q_norm".
std::string pattern_of(const std::string& fqn);

}  // namespace tessera::tensor_parallel

#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace c10 {
class Error;
}

namespace tessera::nn {

/// A hint for a libtorch error in the module `fqn` below `root`: about a tensor on the meta device,
/// or about a buffer with another floating-point type than the parameters have now, because mixed
/// precision casts no buffers. "" if none applies.
std::string hint_for(const c10::Error& error, const ModuleBase& root, const std::string& fqn);

}  // namespace tessera::nn

#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace c10 {
class Error;
}

namespace tessera::nn {

/// A hint for a libtorch error about types in the module `fqn` below `root`: a buffer of an outer
/// module has another floating-point type than parameters have now, because mixed precision casts
/// no buffers. "" if it does not apply.
std::string hint_of_buffer_types(const c10::Error& error, const ModuleBase& root,
                                 const std::string& fqn);

}  // namespace tessera::nn

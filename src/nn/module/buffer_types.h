#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace c10 {
class Error;
}

namespace tessera::nn {

/// What to add to an error of libtorch's about types that the module `fqn` below `root` met: a
/// buffer of a module around it that is of another floating-point type than parameters are now, as
/// a policy of mixed precision has it, which casts no buffers. Else empty.
std::string hint_of_buffer_types(const c10::Error& error, const ModuleBase& root,
                                 const std::string& fqn);

}  // namespace tessera::nn

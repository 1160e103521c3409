#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Throws Error for a buffer of libtorch's kind on the meta device, which cannot be swapped.
/// `asked`: the caller.
void refuse_meta_buffers(const ModuleBase& module, const std::string& asked);

}  // namespace tessera::nn

#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Throws what check_initialized() throws. `remedy` says how to fill storage that was never filled.
void check_filled(const ModuleBase& module, const std::string& asked, const std::string& remedy);

}  // namespace tessera::nn

#pragma once

#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// As check_initialized(), with what mends it: `remedy` ends the message about storage that was
/// never filled.
void check_filled(const ModuleBase& module, const std::string& asked, const std::string& remedy);

}  // namespace tessera::nn

// Checks that storage has been filled; shared by module.cpp, initialization.cpp and parameter.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Like check_initialized(). `remedy`: how to fill storage that was never filled.
void check_filled(const ModuleBase& module, const std::string& caller, const std::string& remedy);

/// Throws Error for a buffer on the meta device that was registered with libtorch's
/// register_buffer, because it cannot be swapped. `caller`: the caller's name.
void refuse_meta_buffers(const ModuleBase& module, const std::string& caller);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// This counter increases whenever a slot gets unfilled storage; modules are then checked again.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail

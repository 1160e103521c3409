// Checks that storage has been filled; shared by module.cpp, initialization.cpp and parameter.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Like check_initialized(). `remedy`: text that says how to fill storage that was never filled.
void check_filled(const ModuleBase& module, const std::string& caller, const std::string& remedy);

/// Throws Error for a buffer on the meta device that was registered with libtorch's
/// register_buffer, because such a buffer cannot be replaced. `caller`: name of the calling
/// function for the message.
void refuse_meta_buffers(const ModuleBase& module, const std::string& caller);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// A counter that increases whenever a slot gets unfilled storage. If it has changed, modules are
/// checked again.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail

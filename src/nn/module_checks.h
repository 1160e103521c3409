// What the module's walk, its initialisation and its slots share: whether storage was filled.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Throws what check_initialized() throws. `remedy` says how to fill storage that was never filled.
void check_filled(const ModuleBase& module, const std::string& caller, const std::string& remedy);

/// Throws Error for a buffer of libtorch's kind on the meta device, which cannot be swapped.
/// `caller`: the caller.
void refuse_meta_buffers(const ModuleBase& module, const std::string& caller);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// A number that changes whenever a slot gets storage that is not filled. A module that was found
/// to be filled stays so until the number changes.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail

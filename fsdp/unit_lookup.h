#pragma once

#include <memory>
#include <vector>

#include "unit.h"

namespace tessera::fsdp {

/// The unit of `module`. Throws Error, in the name of the function that was `asked`, if it has
/// none.
std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* asked);

/// The units of `module` and, if `recurse`, of what is below it. Throws Error if there is none.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* asked);

}  // namespace tessera::fsdp

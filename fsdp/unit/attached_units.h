#pragma once

#include <memory>
#include <vector>

#include "tessera/nn/visit_modules.h"
#include "unit/unit.h"
#include "unit/unit_spec.h"

namespace tessera::fsdp {

/// Makes a unit of modules that are not units yet, and attaches it to them. Not collective.
void make_unit(const UnitSpec& spec);

/// The unit of `module`. Throws Error, in the name of the called function `asked`, if it has none.
std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* asked);

/// The units of `module` and, if `recurse`, of the modules below it, each once, in the order of
/// registration.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse);
/// The same. Throws Error, in the name of the called function `asked`, if there is none.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* asked);

/// A walk over the modules that are in no unit yet.
nn::ModuleWalk outside_of_units();

}  // namespace tessera::fsdp

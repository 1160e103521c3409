#pragma once

#include <map>
#include <string>

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// Throws Error on every rank where the ranks of a job were started with different options, which
/// would train something else without a sign: it names the first option that differs and both
/// values. `own`: value by name; an empty value is an option that is not given. To be called before
/// anything else that is collective over `world`. Collective.
void check_same_options(comm::World& world, const std::map<std::string, std::string>& own);

}  // namespace tessera::training
TESSERA_API_END

#pragma once

#include <string>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The rule of an operator that a layer above core defines. A program may replace it
/// (register_rule). Throws Error after the first rule was looked up: for use before main().
void add_library_rule(std::string op, RuleFunction::Body body, bool reads_numbers = false);

}  // namespace tessera::detail
TESSERA_API_END

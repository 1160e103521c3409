#pragma once

#include <string_view>

#include "tessera/core/sharding_rule.h"

namespace tessera::detail {

/// The entry that a user registered for `op`, or nullptr; from then on `op` counts as looked up.
const RuleFunction::Entry* look_up_user_rule(std::string_view op);

}  // namespace tessera::detail

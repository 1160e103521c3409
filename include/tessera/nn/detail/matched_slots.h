#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// The parameters below `module` with an FQN that matches one of the patterns (matches_fqn): a tied
/// one by any of its FQNs. Throws Error for a pattern that matches none. `caller`: whom the message
/// names.
std::unordered_set<SlotPtr> matched_slots(const ModuleBase& module,
                                          const std::vector<std::string>& patterns,
                                          const char* caller);

}  // namespace tessera::nn::detail
TESSERA_API_END

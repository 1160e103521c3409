#pragma once

#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

/// When a pointwise operator keeps partial inputs, one law after another, separated by blanks. A
/// law is the tensor arguments that are partial together (by ordinal, None left out), the others
/// replicated, and for which reductions:
///   "01"   sum and avg: linear in arguments 0 and 1 together
///   "0<"   max and min: monotone, not decreasing
///   "01^"  max;  "01v"  min
///   "0~"   avg: affine
///   "12*"  every one: elements are selected, not changed
void add_laws(ShardingRule& rule, std::string_view laws, const std::vector<int>& tensors);

}  // namespace tessera::rules

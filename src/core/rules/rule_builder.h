// For the tables in this folder, beside rule_builder.h: the names of operators, and a common rule.
#pragma once

#include <cstddef>
#include <string_view>

#include "tessera/core/rule_builder.h"

namespace tessera::rules {

/// "add_" of "aten::add_.Tensor".
std::string_view base_name(std::string_view op);
/// Whether the base name ends in one underscore, as those of in-place operators do.
bool is_inplace(std::string_view op);
/// How many of an overload's last arguments receive its results: 1 for "aten::add.out", 2 for
/// "aten::sort.values", 0 for an overload that returns them.
std::size_t out_count(std::string_view op);

/// The rule of a call whose result has the sizes of argument 0, and is laid out as that.
ShardingRule unchanged(const OpCall& call);

}  // namespace tessera::rules

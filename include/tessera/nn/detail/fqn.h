#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The FQN of a child `name` of the module `parent`: "layers.0" and "mlp" make "layers.0.mlp".
std::string join_fqn(const std::string& parent, const std::string& name);

/// Renames `fqn` by the pair of patterns {from, to}. Returns nullopt if `fqn` does not match
/// `from`; otherwise returns `to`, with its n-th wildcard replaced by the text that the n-th
/// wildcard in `from` matched. If several matches are possible, each wildcard but the last matches
/// as little as possible.
///   {"blocks.*.mlp.fc[12].*", "layers.*.fc[12].*"}   "blocks.3.mlp.fc1.bias" ->
///   "layers.3.fc1.bias"
/// Throws Error unless both patterns have the same wildcards in the same order; `from` may have
/// additional wildcards at the end. Thread safe.
std::optional<std::string> renamed_fqn(std::string_view from, std::string_view to,
                                       std::string_view fqn);

}  // namespace tessera::nn
TESSERA_API_END

#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Whether a fully qualified name matches a pattern. All name patterns in the library have this
/// syntax: parallel plans, nn::named, initialiser tables, optim::split_for_muon.
///
/// Names and patterns are split at the dots, and each segment is compared with one segment. In a
/// segment:
///   *       any number of characters, also none    "layers.*.w" matches "layers.10.w", not
///     "layers.0.mlp.w"
///   ?       one character                "layers.?.w" matches "layers.3.w"
///   [qkv]   one of these characters      "attn.[qkv]_proj" matches "attn.q_proj"
///   [0-9]   one of this range            "layers.[0-3]" matches "layers.2"
///   [!0-9]  one that is not of these     also written [^0-9]
///   **      as a whole segment: any number of segments, also none.
///           "layers.**.w" matches "layers.w" and "layers.0.mlp.w"; "**" matches every name
/// Every other character matches itself, and so does a '[' without a ']'. A ']' directly after the
/// '[' is one of the set's characters. There is no escape character, since module names contain
/// none of the special characters. "" is the name of the root module: the patterns "" and "**"
/// match it, "*" does not.
///
/// Time: at most proportional to the length of the pattern times that of the name. Thread safe.
bool matches_fqn(std::string_view pattern, std::string_view fqn);

namespace detail {

/// The FQN of a module's child: join_fqn("layers.0", "mlp") is "layers.0.mlp".
std::string join_fqn(const std::string& parent, const std::string& name);

/// Renames `fqn` by the pair of patterns {from, to}. Returns nullopt if `fqn` does not match
/// `from`. Otherwise returns `to`, with each wildcard replaced by the text that the same wildcard
/// in `from` matched. If several matches are possible, each wildcard but the last matches as little
/// as possible.
///   {"blocks.*.mlp.fc[12].*", "layers.*.fc[12].*"}   "blocks.3.mlp.fc1.bias" ->
///   "layers.3.fc1.bias"
/// Throws Error unless both patterns have the same wildcards in the same order; `from` may have
/// additional wildcards at the end. Thread safe.
std::optional<std::string> renamed_fqn(std::string_view from, std::string_view to,
                                       std::string_view fqn);

}  // namespace detail

}  // namespace tessera::nn
TESSERA_API_END

#pragma once

#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Whether a fully qualified name matches a pattern. All name patterns in the library have this
/// syntax: parallel plans, fsdp::wrap_named, nn::named, initialiser tables, optim::split_for_muon.
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

}  // namespace detail

}  // namespace tessera::nn
TESSERA_API_END

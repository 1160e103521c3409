#pragma once

#include <string_view>

namespace tessera::nn {

/// Whether a fully qualified name matches a pattern, component by component between the dots, as
/// fnmatch: '*' stands for any characters and '?' for one within a component.
/// "layers.*.mlp.*.weight" matches "layers.3.mlp.up_proj.weight".
bool matches_fqn(std::string_view pattern, std::string_view fqn);

}  // namespace tessera::nn

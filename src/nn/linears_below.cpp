#include "linears_below.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn::detail {

bool NamedLinear::is_named_by(const std::vector<std::string>& patterns) const {
  return std::ranges::any_of(
      patterns, [this](const std::string& pattern) { return matches_fqn(pattern, fqn); });
}

std::vector<NamedLinear> linears_below(const ModuleBase& root) {
  std::vector<NamedLinear> found;
  // libtorch hands out the children of a const module as mutable ones, too.
  visit_modules(const_cast<ModuleBase&>(root), [&](const std::string& fqn, ModuleBase& module) {
    if (auto* linear = dynamic_cast<Linear*>(&module)) {
      found.push_back({fqn, linear});
    }
  });
  return found;
}

void check_each_matches(std::string_view asked, const std::vector<std::string>& patterns,
                        const std::vector<NamedLinear>& linears, const ModuleBase& root,
                        std::string_view remedy) {
  for (const std::string& pattern : patterns) {
    TESSERA_CHECK(std::ranges::any_of(
                      linears, [&](const auto& each) { return matches_fqn(pattern, each.fqn); }),
                  asked, ": the pattern '", pattern, "' matches no nn::Linear of a ", root.name(),
                  "; ", remedy);
  }
}

}  // namespace tessera::nn::detail

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/linear.h"

namespace tessera::nn::detail {

struct NamedLinear {
  std::string fqn;
  Linear* linear = nullptr;

  /// Whether one of `patterns`, as of matches_fqn(), is of its name.
  bool is_named_by(const std::vector<std::string>& patterns) const;
};
/// Every Linear of `root`, itself included, in its order.
std::vector<NamedLinear> linears_below(const ModuleBase& root);

/// Throws Error unless each pattern names one of `linears`, those of `root`. `asked`: the caller;
/// `remedy`: how its message ends.
void check_each_matches(std::string_view asked, const std::vector<std::string>& patterns,
                        const std::vector<NamedLinear>& linears, const ModuleBase& root,
                        std::string_view remedy);

}  // namespace tessera::nn::detail

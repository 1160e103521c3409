#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/wrap_policy.h"

namespace tessera::fsdp {

/// What wrap_named returns.
struct NamedPolicy {
  std::optional<UnitOptions> operator()(const Candidate& candidate) const;

  std::string pattern;
  UnitOptions options;
};

/// What first_of returns.
struct FirstPolicy {
  std::optional<UnitOptions> operator()(const Candidate& candidate) const;

  std::vector<Policy> policies;
};

/// Calls `act` with each pattern that `policy` contains.
void for_each_pattern(const Policy& policy, const std::function<void(const std::string&)>& act);

}  // namespace tessera::fsdp

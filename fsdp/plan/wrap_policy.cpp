// The policies that the library offers. They are functions like a user's own, but those with a
// pattern are types that for_each_pattern can find inside of std::function, so that a pattern that
// matches no module is an error and not a silent omission.

#include "plan/named_policy.h"

#include <utility>

#include "tessera/nn/fqn_pattern.h"

namespace tessera::fsdp {

Policy wrap_if(std::function<bool(const Candidate&)> predicate, UnitOptions options) {
  return [predicate = std::move(predicate),
          options](const Candidate& candidate) -> std::optional<UnitOptions> {
    if (!predicate(candidate)) {
      return std::nullopt;
    }
    return options;
  };
}

std::optional<UnitOptions> NamedPolicy::operator()(const Candidate& candidate) const {
  if (!nn::matches_fqn(pattern, candidate.fqn)) {
    return std::nullopt;
  }
  return options;
}

std::optional<UnitOptions> FirstPolicy::operator()(const Candidate& candidate) const {
  for (const Policy& policy : policies) {
    if (std::optional<UnitOptions> options = policy(candidate)) {
      return options;
    }
  }
  return std::nullopt;
}

void for_each_pattern(const Policy& policy, const std::function<void(const std::string&)>& act) {
  // A policy of the user's own has no pattern to check.
  if (const auto* named = policy.target<NamedPolicy>()) {
    act(named->pattern);
  } else if (const auto* first = policy.target<FirstPolicy>()) {
    for (const Policy& each : first->policies) {
      for_each_pattern(each, act);
    }
  }
}

Policy wrap_named(std::string pattern, UnitOptions options) {
  return NamedPolicy{std::move(pattern), std::move(options)};
}

Policy wrap_larger_than(std::int64_t numel, UnitOptions options) {
  return wrap_if([numel](const Candidate& candidate) { return candidate.numel >= numel; },
                 std::move(options));
}

Policy first_of(std::vector<Policy> policies) {
  return FirstPolicy{std::move(policies)};
}

}  // namespace tessera::fsdp

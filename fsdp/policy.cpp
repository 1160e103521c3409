#include "tessera/fsdp/policy.h"

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

Policy wrap_named(std::string pattern, UnitOptions options) {
  return wrap_if(
      [pattern = std::move(pattern)](const Candidate& candidate) {
        return nn::matches_fqn(pattern, candidate.fqn);
      },
      std::move(options));
}

Policy wrap_larger_than(std::int64_t numel, UnitOptions options) {
  return wrap_if([numel](const Candidate& candidate) { return candidate.numel >= numel; },
                 std::move(options));
}

Policy first_of(std::vector<Policy> policies) {
  return
      [policies = std::move(policies)](const Candidate& candidate) -> std::optional<UnitOptions> {
        for (const Policy& policy : policies) {
          if (std::optional<UnitOptions> options = policy(candidate)) {
            return options;
          }
        }
        return std::nullopt;
      };
}

}  // namespace tessera::fsdp

// Switches from the environment, read where they are used (comm, dtensor, fsdp). A misspelt value
// is an error and not "off": a check that the user wants would silently not run.
#include "tessera/core/detail/environment_switch.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::detail {

/// An empty variable counts as not set, as shells leave one behind by NAME= .
std::optional<bool> environment_switch(const char* name) {
  static constexpr std::array<std::string_view, 3> kOn{"1", "true", "on"};
  static constexpr std::array<std::string_view, 3> kOff{"0", "false", "off"};
  const char* found = std::getenv(name);
  const std::string_view value = found == nullptr ? "" : found;
  if (value.empty()) {
    return std::nullopt;
  }
  const bool on = std::ranges::find(kOn, value) != kOn.end();
  TESSERA_CHECK(on || std::ranges::find(kOff, value) != kOff.end(), "environment variable ", name,
                "=", value, ": not a switch; set it to 1, true or on, or to 0, false or off");
  return on;
}

/// Checks that cost communication. `unset`: what the caller does without the variable, which
/// differs by how much its check costs.
bool debug_checks(bool unset) {
  return environment_switch("TESSERA_DEBUG").value_or(unset);
}

}  // namespace tessera::detail

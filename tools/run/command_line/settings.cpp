#include "settings.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

std::optional<Setting> find_variable(const char* variable) {
  const char* value = variable == nullptr ? nullptr : std::getenv(variable);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return Setting{value, std::string(variable) + "=" + value};
}

}  // namespace

std::optional<Setting> find_setting(const CLI::App& app, const std::string& option,
                                    const char* variable) {
  const CLI::Option& found = *app.get_option(option);
  if (found.count() == 0) {
    return find_variable(variable);
  }
  const auto value = found.as<std::string>();
  return Setting{value, option + " " + value};
}

std::optional<Setting> find_switch(const CLI::App& app, const std::string& option,
                                   const char* variable) {
  if (app.get_option(option)->count() > 0) {
    return Setting{"1", option};
  }
  auto setting = find_variable(variable);
  constexpr int kMost = std::numeric_limits<int>::max();
  return setting && integer_of(*setting, 0, kMost) != 0 ? setting : std::nullopt;
}

int integer_of(const Setting& setting, int least, int most) {
  int value = 0;
  const char* end = setting.value.data() + setting.value.size();
  const auto [stop, error] = std::from_chars(setting.value.data(), end, value);
  TESSERA_CHECK(error != std::errc::invalid_argument && stop == end, setting.text,
                " is not a number from ", least, " to ", most);
  TESSERA_CHECK(error == std::errc() && value >= least && value <= most, setting.text,
                " is out of range: ", least, " to ", most);
  return value;
}

double seconds_of(const Setting& setting, bool may_be_zero) {
  double value = 0;
  const char* end = setting.value.data() + setting.value.size();
  const auto [stop, error] = std::from_chars(setting.value.data(), end, value);
  constexpr double kLongest = 1e6;  // the ranks' limit as well (job_variables.cpp)
  const bool in_range = (value > 0 || (may_be_zero && value == 0)) && value <= kLongest;
  TESSERA_CHECK(error == std::errc() && stop == end && in_range, setting.text,
                " is no number of seconds ", may_be_zero ? "from 0" : "above 0", " to 1000000");
  return value;
}

}  // namespace tessera::run

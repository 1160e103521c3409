// The value of an option, wherever it was given. As with torchrun an option wins over the variable
// PET_<NAME>, and that over the default. An empty variable is none.

#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}  // namespace CLI

namespace tessera::run {

/// A value and where it is from.
struct Setting {
  std::string value;
  std::string text;  ///< for messages: "--nnodes 2" or "PET_NNODES=2"
};

/// nullopt: it was not given. `variable`: torchrun's, or nullptr.
std::optional<Setting> find_setting(const CLI::App& app, const std::string& option,
                                    const char* variable = nullptr);

/// For an option without a value: whether it was given, or its variable is a number other than 0.
std::optional<Setting> find_switch(const CLI::App& app, const std::string& option,
                                   const char* variable);

/// Throws Error for a value other than an integer from `least` to `most`.
int integer_of(const Setting& setting, int least, int most);

/// In seconds; throws Error for one that is below 0, above a million, or 0 where it may not be.
double seconds_of(const Setting& setting, bool may_be_zero);

}  // namespace tessera::run

#include "examples/llama/resolved_flags.h"

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "examples/llama/cli.h"

namespace llama {
namespace {

bool starts_with_any(std::string_view text, const std::array<const char*, 3>& beginnings) {
  return std::ranges::any_of(beginnings, [&](const char* part) { return text.starts_with(part); });
}

bool is_path(const CLI::Option& option) {
  return starts_with_any(option.get_option_text(), {"FILE", "DIR", "GLOB"});
}

/// Some defaults stand for "none", and can't be given: --keep 0.
bool can_be_given(CLI::Option& option, const std::string& value) {
  try {
    std::string text = value;
    return (*option.get_validator(0))(text).empty();
  } catch (const CLI::OptionNotFound&) {
    return true;  // no check
  }
}

/// CLI11 writes a list as "[a,b]".
std::vector<std::string> default_values(CLI::Option& option) {
  std::string text = option.capture_default_str()->get_default_str();
  if (option.get_items_expected_max() > 1) {
    text = CLI::detail::trim_copy(text, "[]");
  }
  if (text.empty()) {
    return {};
  }
  std::vector<std::string> values = option.get_items_expected_max() > 1
                                        ? CLI::detail::split(text, ',')
                                        : std::vector<std::string>{text};
  const bool real = std::ranges::all_of(
      values, [&](const std::string& value) { return can_be_given(option, value); });
  return real ? values : std::vector<std::string>{};
}

/// Of the text that the user gave, and of that which a file gives back, one form.
void write_alike(std::string& value, const CLI::Option& option) {
  if (is_path(option) && !value.empty()) {
    value = std::filesystem::absolute(value).lexically_normal().string();
  } else if (option.get_type_name().starts_with("FLOAT")) {
    value = number_text(std::stod(value));
  }
}

ResolvedFlag resolve(CLI::Option& option) {
  ResolvedFlag flag{.name = option.get_single_name(),
                    .is_list = option.get_items_expected_max() > 1,
                    .is_number = starts_with_any(option.get_type_name(), {"INT", "UINT", "FLOAT"}),
                    .is_switch = option.get_items_expected_max() == 0};
  flag.values = option.count() > 0 ? option.reduced_results() : default_values(option);
  for (std::string& value : flag.values) {
    write_alike(value, option);
  }
  return flag;
}

/// TOML knows fewer forms of numbers than the command line.
bool is_toml_number(const std::string& text) {
  try {
    return toml::parse("x = " + text)["x"].is_number();
  } catch (const toml::parse_error&) {
    return false;
  }
}

std::string toml_value(const ResolvedFlag& flag, const std::string& value) {
  if (flag.is_switch || (flag.is_number && is_toml_number(value))) {
    return value;
  }
  std::ostringstream out;
  out << toml::value<std::string>(value);
  return out.str();
}

std::string toml_line(const ResolvedFlag& flag) {
  if (flag.values.empty()) {
    return "# " + flag.name + " is not given\n";
  }
  std::string values;
  for (const std::string& value : flag.values) {
    values += (values.empty() ? "" : ", ") + toml_value(flag, value);
  }
  const std::string entry = flag.name + " = " + (flag.is_list ? "[" + values + "]" : values);
  return flag.note.empty() ? entry + "\n" : "# " + entry + "  (" + flag.note + ")\n";
}

}  // namespace

std::vector<ResolvedFlag> resolve_flags(CLI::App& app) {
  std::vector<ResolvedFlag> flags;
  for (CLI::Option* option : app.get_options()) {
    const std::string& name = option->get_single_name();
    if (name != "help" && name != "config-file") {
      flags.push_back(resolve(*option));
    }
  }
  return flags;
}

void leave_out(std::vector<ResolvedFlag>& flags, const std::vector<LeftOut>& left_out) {
  for (const auto& [name, note] : left_out) {
    std::ranges::find(flags, name, &ResolvedFlag::name)->note = note;
  }
}

std::string to_toml(const std::vector<ResolvedFlag>& flags) {
  std::string text;
  for (const ResolvedFlag& flag : flags) {
    text += toml_line(flag);
  }
  return text;
}

}  // namespace llama

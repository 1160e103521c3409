// CLI11 has a reader of its own, whose sections are subcommands, and which knows a part of TOML.

#include "examples/llama/config_file.h"

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <istream>
#include <memory>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"

namespace llama {
namespace {

/// The entries of one file, as CLI11 takes them.
class Entries {
 public:
  Entries(const CLI::App& app, const std::vector<FlagNames>& alternatives, std::string file)
      : app_(app), alternatives_(alternatives), file_(std::move(file)) {}

  /// Those of the file, or of a `section` in it.
  void add(const toml::table& table, const std::string& section = "") {
    for (const auto& [key, node] : table) {
      const std::string name(key.str());
      const toml::table* inner = section.empty() ? node.as_table() : nullptr;
      if (inner == nullptr) {
        add_flag(name, node, section);
      } else {
        check_section(name);
        add(*inner, name);
      }
    }
  }
  std::vector<CLI::ConfigItem> take() { return std::move(items_); }

 private:
  void check_section(const std::string& section) const;
  void add_flag(const std::string& key, const toml::node& node, const std::string& section);
  std::vector<std::string> inputs(const std::string& key, const toml::node& node,
                                  const CLI::Option& option) const;
  std::string text(const std::string& key, const toml::node& node) const;
  bool is_decided(const CLI::Option& option) const;

  const CLI::App& app_;
  const std::vector<FlagNames>& alternatives_;
  std::string file_;
  std::set<const CLI::Option*> seen_;
  std::vector<CLI::ConfigItem> items_;
};

void Entries::check_section(const std::string& section) const {
  FlagNames known = app_.get_groups();
  std::erase(known, app_.get_help_ptr()->get_group());
  TESSERA_CHECK(!known.empty(), file_, " has a section [", section,
                "], but the flags of this program are in none; leave that line out");
  TESSERA_CHECK(std::ranges::find(known, section) != known.end(), "unknown section [", section,
                "] in ", file_, "; did you mean [", nearest(section, known), "]?");
}

void Entries::add_flag(const std::string& key, const toml::node& node, const std::string& section) {
  const CLI::Option* option = app_.get_option_no_throw("--" + key);
  if (option == nullptr) {
    const std::string place = (section.empty() ? "" : "[" + section + "] of ") + file_;
    fail_unknown("name \"" + key + "\" in " + place, key, app_);
  }
  TESSERA_CHECK(option->get_configurable(), file_, ": \"", key,
                "\" is for the command line alone; leave it out here");
  TESSERA_CHECK(section.empty() || section == option->get_group(), file_, ": \"", key, "\" is in [",
                section, "], but belongs to [", option->get_group(), "]; move it there");
  TESSERA_CHECK(seen_.insert(option).second, file_, ": \"", key,
                "\" is given twice; leave one of them out");
  std::vector<std::string> values = inputs(key, node, *option);
  if (!values.empty() && !is_decided(*option)) {
    items_.push_back({.name = key, .inputs = std::move(values)});
  }
}

/// Empty for a flag that is not given: one without a value and without a --no- form, if false.
std::vector<std::string> Entries::inputs(const std::string& key, const toml::node& node,
                                         const CLI::Option& option) const {
  if (const auto* flag = node.as_boolean()) {
    TESSERA_CHECK(option.get_expected_min() == 0, file_, ": \"", key, "\" takes a value");
    if (flag->get()) {
      return {"{}"};  // CLI11's sign for a flag without a value
    }
    return option.check_lname("no-" + key) ? FlagNames{"false"} : FlagNames{};
  }
  TESSERA_CHECK(option.get_items_expected_max() > 0, file_, ": \"", key,
                "\" must be true or false, without quotes");
  const auto* list = node.as_array();
  if (list == nullptr) {
    return {text(key, node)};
  }
  TESSERA_CHECK(option.get_items_expected_max() > 1, file_, ": \"", key,
                "\" takes one value, no list");
  TESSERA_CHECK(!list->empty(), file_, ": \"", key,
                "\" is an empty list; give a value, or leave the name out");
  std::vector<std::string> values;
  for (const toml::node& value : *list) {
    values.push_back(text(key, value));
  }
  return values;
}

/// As it would stand on the command line, so that a file's values pass the same checks.
std::string Entries::text(const std::string& key, const toml::node& node) const {
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* integer = node.as_integer()) {
    return std::to_string(integer->get());
  }
  if (const auto* real = node.as_floating_point()) {
    return number_text(real->get());
  }
  tessera::fail(file_, ": \"", key,
                "\" must be a string, a number, true or false, or an array of strings or numbers");
}

/// Whether the command line has the flag, or one that is passed instead of it.
bool Entries::is_decided(const CLI::Option& option) const {
  return option.count() > 0 || std::ranges::any_of(alternatives_, [&](const FlagNames& names) {
           return std::ranges::find(names, option.get_single_name()) != names.end() &&
                  std::ranges::any_of(names, [&](const std::string& name) {
                    return app_.get_option("--" + name)->count() > 0;
                  });
         });
}

class TomlFile : public CLI::ConfigBase {
 public:
  TomlFile(const CLI::App& app, std::vector<FlagNames> alternatives)
      : app_(app), alternatives_(std::move(alternatives)) {}

  std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
    const std::string file = app_.get_config_ptr()->results().back();
    Entries entries(app_, alternatives_, file);
    try {
      entries.add(toml::parse(in));
    } catch (const toml::parse_error& error) {
      tessera::fail("can't read --config-file ", file, ": ", error.description(), " (line ",
                    error.source().begin.line, ")");
    }
    return entries.take();
  }

 private:
  const CLI::App& app_;
  std::vector<FlagNames> alternatives_;
};

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

/// One form for the text that the user gave and for that which a file has.
void write_alike(std::string& value, const CLI::Option& option) {
  if (is_path(option) && !value.empty()) {
    value = std::filesystem::absolute(value).lexically_normal().string();
  } else if (option.get_type_name().starts_with("FLOAT")) {
    value = number_text(std::stod(value));
  }
}

ResolvedFlag resolve(CLI::Option& option) {
  ResolvedFlag flag{.name = option.get_single_name(),
                    .section = option.get_group(),
                    .is_list = option.get_items_expected_max() > 1,
                    .is_number = starts_with_any(option.get_type_name(), {"INT", "UINT", "FLOAT"}),
                    .is_switch = option.get_items_expected_max() == 0,
                    .is_path = is_path(option)};
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

void declare_config_file(CLI::App& app, const std::vector<FlagNames>& alternatives) {
  app.set_config("--config-file", "",
                 "These flags in a TOML file, by name, in the sections of --help or in none; "
                 "flags given here win over it")
      ->option_text("FILE.toml");
  app.config_formatter(std::make_shared<TomlFile>(app, alternatives));
}

std::vector<ResolvedFlag> resolve_flags(CLI::App& app) {
  std::vector<ResolvedFlag> flags;
  for (CLI::Option* option : app.get_options()) {
    if (option->get_configurable()) {
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

std::map<std::string, std::string> shared_by_ranks(const std::vector<ResolvedFlag>& flags) {
  std::map<std::string, std::string> values;
  for (const ResolvedFlag& flag : flags) {
    if (!flag.values.empty() && flag.name != "metrics" && flag.name != "tensorboard") {
      values["--" + flag.name] = flag.is_path ? "FILE" : CLI::detail::join(flag.values, ",");
    }
  }
  return values;
}

std::string to_toml(const std::vector<ResolvedFlag>& flags) {
  std::string text, section;
  for (const ResolvedFlag& flag : flags) {
    if (flag.section != section) {
      section = flag.section;
      text += "\n[" + section + "]\n";
    }
    text += toml_line(flag);
  }
  return text;
}

}  // namespace llama

// Reads flags from the command line and from a --config-file.

#include "examples/llama/cli.h"

#include <fnmatch.h>
#include <glob.h>
#include <toml++/toml.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iostream>
#include <istream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/process.h"

namespace llama {
namespace {

/// Returns a check that accepts numbers for which `holds` returns true. The error message of the
/// check is "X is not a number" followed by `range`.
CLI::Validator number_check(const std::string& range, const std::function<bool(double)>& holds) {
  const auto check = [range, holds](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
    return is_number && holds(value) ? std::string() : text + " is not a number " + range;
  };
  return {check, range};
}

template <class Integer>
bool is_whole(std::string_view text) {
  text.remove_prefix(text.starts_with('+') ? 1 : 0);
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// Makes an integer option accept only decimal integers of 64 bits. CLI11 would clamp larger
/// integers.
void check_integers(CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::string name = type.substr(0, type.find(':'));
  if (name == "INT" || name == "UINT") {
    option.check(
        [name](const std::string& text) {
          const bool fits =
              name == "INT" ? is_whole<std::int64_t>(text) : is_whole<std::uint64_t>(text);
          return fits ? std::string() : text + " is not a decimal integer of at most 64 bits";
        },
        "");
  }
}

bool starts_with_any(std::string_view text, const std::array<const char*, 3>& beginnings) {
  return std::ranges::any_of(beginnings, [&](const char* part) { return text.starts_with(part); });
}

bool is_path(const CLI::Option& option) {
  return starts_with_any(option.get_option_text(), {"FILE", "DIR", "GLOB"});
}

/// Throws Error if a flag that takes one value is given two different values, or if a path is
/// empty. CLI11 would silently use the last value, and the program ignore an empty path.
void check_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& values = option->results();
    TESSERA_CHECK(!is_path(*option) || std::ranges::find(values, "") == values.end(),
                  option->get_positional() ? "" : "--", option->get_single_name(),
                  " is given an empty value; pass ", option->get_option_text());
    const auto other = std::ranges::find_if(
        values, [&](const std::string& value) { return value != values.front(); });
    TESSERA_CHECK(option->get_items_expected_max() > 1 || other == values.end(), "--",
                  option->get_single_name(), " is given as ", values.front(), " and as ", *other,
                  ", but takes one value; pass the flag once");
  }
}

void declare_config_file(CLI::App& app, const std::vector<FlagNames>& alternatives);

void prepare(CLI::App& app, const std::vector<FlagNames>& alternatives) {
  app.option_defaults()->group(app.get_help_ptr()->get_group());
  app.set_help_all_flag("--help-all", "Print all flags, by the sections of --config-file");
  declare_config_file(app, alternatives);
  for (CLI::Option* option : app.get_options()) {
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    check_integers(*option);
  }
  // CLI11 must accept unknown flags, so that fail_unknown() can reject them and suggest a name.
  app.allow_extras();
}

/// Throws Error for an unknown flag name, and suggests the most similar known name. `what`: the
/// name, and where the user wrote the name.
[[noreturn]] void fail_unknown(const std::string& what, std::string_view name,
                               const CLI::App& app) {
  FlagNames names;
  for (const CLI::Option* option : app.get_options()) {
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  tessera::fail("unknown ", what, "; did you mean --", nearest(name, names), "? (",
                app.get_help_all_ptr() == nullptr ? "--help" : "--help-all", " lists all)");
}

/// Hides all flags except `first` from --help. CLI11 does not print flags without a group, so the
/// groups of the hidden flags are removed.
void leave_out_of_help(CLI::App& app, const FlagNames& first) {
  for (CLI::Option* option : app.get_options()) {
    const bool is_first = std::ranges::find(first, option->get_single_name()) != first.end();
    if (!first.empty() && option->get_configurable() && !is_first) {
      option->group("");
    }
  }
}

}  // namespace

std::string number_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

CLI::Option* add_switch(CLI::App& app, const std::string& names, bool& on,
                        const std::string& help) {
  return app.add_flag(names, on, help)->default_function([&on] { return on ? "true" : "false"; });
}

CLI::Validator number_between(double least, double most) {
  return number_check("from " + number_text(least) + " to " + number_text(most),
                      [=](double value) { return value >= least && value <= most; });
}

CLI::Validator number_of_at_least_0() {
  return number_check("of at least 0", [](double value) { return value >= 0; });
}

CLI::Validator number_above_0() {
  return number_check("above 0",
                      [](double value) { return value >= std::numeric_limits<double>::min(); });
}

CLI::Validator number_above_0_to(double most) {
  return number_check("above 0, up to " + number_text(most), [=](double value) {
    return value >= std::numeric_limits<double>::min() && value <= most;
  });
}

void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const std::vector<FlagNames>& alternatives, const FlagNames& first) {
  prepare(app, alternatives);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 expects reversed arguments
  try {
    app.parse(arguments);
  } catch (const CLI::Success& asked) {
    if (asked.get_name() == "CallForHelp") {
      leave_out_of_help(app, first);
    }
    std::cout << CLI::detail::find_and_replace(app.help(), "\n\n\n", "\n\n");
    throw;
  } catch (const CLI::FileError&) {
    tessera::fail("can't read --config-file ", app.get_config_ptr()->results().back(),
                  "; pass a readable TOML file");
  } catch (const CLI::ParseError& error) {
    tessera::fail(error.what(), " (--help lists the flags)");
  }
  if (!app.remaining().empty()) {
    const std::string extra = app.remaining().front();
    fail_unknown((extra.rfind('-', 0) == 0 ? "flag " : "argument ") + extra,
                 extra.substr(std::min(extra.find_first_not_of('-'), extra.size())), app);
  }
  check_values(app);
}

int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>)) {
  std::signal(SIGXFSZ, SIG_IGN);  // write() beyond the file-size limit returns an error
  try {
    const int status = body(std::vector<std::string>(argv + 1, argv + argc));
    tessera::files::flush_output();
    return status;
  } catch (const CLI::Success&) {
    return 0;
  } catch (const std::exception& error) {
    tessera::end_program(name, error.what());
  }
}

// Replaces CLI11's reader of configuration files, which reads sections as subcommands and supports
// only a part of TOML.

namespace {

class Entries {
 public:
  Entries(const CLI::App& app, const std::vector<FlagNames>& alternatives, std::string file)
      : app_(app), alternatives_(alternatives), file_(std::move(file)) {}

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
  void check_section(const std::string& section) const {
    FlagNames known = app_.get_groups();
    std::erase(known, app_.get_help_ptr()->get_group());
    TESSERA_CHECK(!known.empty(), file_, " has a section [", section,
                  "], but the flags of this program have no sections; remove the section's line");
    TESSERA_CHECK(std::ranges::find(known, section) != known.end(), "unknown section [", section,
                  "] in ", file_, "; did you mean [", nearest(section, known), "]?");
  }

  void add_flag(const std::string& key, const toml::node& node, const std::string& section) {
    const CLI::Option* option = app_.get_option_no_throw("--" + key);
    if (option == nullptr) {
      const std::string place = (section.empty() ? "" : "[" + section + "] of ") + file_;
      fail_unknown("name \"" + key + "\" in " + place, key, app_);
    }
    TESSERA_CHECK(option->get_configurable(), file_, ": \"", key,
                  "\" works only on the command line; remove the line from the file");
    TESSERA_CHECK(section.empty() || section == option->get_group(), file_, ": \"", key,
                  "\" is in [", section, "], but belongs to [", option->get_group(),
                  "]; move the line to that section");
    TESSERA_CHECK(seen_.insert(option).second, file_, ": \"", key,
                  "\" is given twice; remove one of the two lines");
    std::vector<std::string> values = inputs(key, node, *option);
    if (!values.empty() && !is_decided(*option)) {
      items_.push_back({.name = key, .inputs = std::move(values)});
    }
  }

  /// Converts a flag's value in the file to strings for CLI11. Returns no strings if the value is
  /// false and the switch has no --no- form.
  std::vector<std::string> inputs(const std::string& key, const toml::node& node,
                                  const CLI::Option& option) const {
    if (const auto* flag = node.as_boolean()) {
      TESSERA_CHECK(option.get_expected_min() == 0, file_, ": \"", key, "\" needs a value");
      if (flag->get()) {
        return {"{}"};
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
                  "\" takes one value, not a list");
    TESSERA_CHECK(!list->empty(), file_, ": \"", key,
                  "\" is an empty list; write a value, or remove the line");
    std::vector<std::string> values;
    for (const toml::node& value : *list) {
      values.push_back(text(key, value));
    }
    return values;
  }

  /// Returns a value of the configuration file as text, so that the command line's checks apply to
  /// the value.
  std::string text(const std::string& key, const toml::node& node) const {
    if (const auto* text = node.as_string()) {
      return text->get();
    }
    if (const auto* integer = node.as_integer()) {
      return std::to_string(integer->get());
    }
    if (const auto* real = node.as_floating_point()) {
      return number_text(real->get());
    }
    tessera::fail(
        file_, ": \"", key,
        "\" must be a string, a number, true or false, or an array of strings or numbers");
  }

  /// Whether the command line has the flag `option`, or a flag that excludes `option`.
  bool is_decided(const CLI::Option& option) const {
    return option.count() > 0 || std::ranges::any_of(alternatives_, [&](const FlagNames& names) {
             return std::ranges::find(names, option.get_single_name()) != names.end() &&
                    std::ranges::any_of(names, [&](const std::string& name) {
                      return app_.get_option("--" + name)->count() > 0;
                    });
           });
  }

  const CLI::App& app_;
  const std::vector<FlagNames>& alternatives_;
  std::string file_;
  std::set<const CLI::Option*> seen_;
  std::vector<CLI::ConfigItem> items_;
};

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

/// Whether the check of `option` accepts `value` on the command line. The check rejects some
/// default values, for example 0 for --keep (no limit).
bool can_be_given(CLI::Option& option, const std::string& value) {
  try {
    std::string text = value;
    return (*option.get_validator(0))(text).empty();
  } catch (const CLI::OptionNotFound&) {
    return true;  // CLI11's get_validator() throws for an option without a check
  }
}

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

/// Normalizes `value`, so that equal values from the command line and from a file have equal
/// strings.
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

/// Whether TOML accepts `text` as a number. CLI11 accepts more forms of numbers than TOML.
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

void declare_config_file(CLI::App& app, const std::vector<FlagNames>& alternatives) {
  app.set_config("--config-file", "",
                 "TOML file with flags by name, with or without the sections of --help-all; "
                 "flags on the command line override the file")
      ->option_text("FILE.toml");
  app.config_formatter(std::make_shared<TomlFile>(app, alternatives));
}

}  // namespace

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

namespace {

/// Returns the absolute path of a file without symbolic links or a final slash, so that all paths
/// of one file give the same result.
std::filesystem::path place_of(const std::string& file) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(file, error);
  const std::filesystem::path known = std::filesystem::weakly_canonical(path, error);
  const std::filesystem::path place = error ? path.lexically_normal() : known;
  return place.has_filename() ? place : place.parent_path();
}

/// Returns the paths of all files that a program reads for a flag with the value `path`: a file,
/// the matches of a glob, or the files in a model's folder.
std::vector<std::string> places_read(const std::string& path) {
  constexpr std::array kOfModel{"*.safetensors",     "*.safetensors.index.json",
                                "config.json",       "generation_config.json",
                                "tokenizer*",        "special_tokens_map.json",
                                "added_tokens.json", "vocab.json",
                                "merges.txt",        "*.jinja",
                                "manifest.json"};
  std::vector<std::string> places{path};
  if (std::error_code error; std::filesystem::is_directory(path, error)) {
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      const std::string name = entry.path().filename().string();
      if (std::ranges::any_of(kOfModel, [&](const char* pattern) {
            return fnmatch(pattern, name.c_str(), 0) == 0;
          })) {
        places.push_back(entry.path().string());
      }
    }
  } else {
    glob_t found{};
    glob(path.c_str(), GLOB_NOSORT, nullptr, &found);
    places.insert(places.end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
  }
  return places;
}

}  // namespace

void check_files_differ(const std::vector<NamedFile>& files) {
  std::map<std::filesystem::path, const NamedFile*> known;
  for (const NamedFile& file : files) {
    if (file.path.empty()) {
      continue;
    }
    for (const std::string& path :
         file.is_read ? places_read(file.path) : std::vector<std::string>{file.path}) {
      const auto [other, is_new] = known.try_emplace(place_of(path), &file);
      TESSERA_CHECK(is_new || (file.is_read && other->second->is_read), other->second->what,
                    " and ", file.what, " are both ", path, "; pass different paths");
    }
  }
}

}  // namespace llama

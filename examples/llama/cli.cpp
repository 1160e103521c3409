#include "examples/llama/cli.h"

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <numeric>
#include <sstream>

#include "tessera/core/end_program.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// One row of the table at a time; `diagonal` is the value that the row has just overwritten.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

/// All long names of the program's options, negated flags included.
std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back(name);
    }
  }
  return names;
}

/// A misspelt name is an error: silently ignored, it would train with a default.
[[noreturn]] void unknown(const std::string& what, std::string_view name, const CLI::App& app) {
  tessera::fail("unknown ", what, "; did you mean --", nearest(name, long_names(app)),
                "? (--help lists all)");
}

/// As it would stand on the command line, so that a file's values pass the same checks.
std::string file_value(const toml::node& node, const std::string& key, const std::string& file) {
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* integer = node.as_integer()) {
    return std::to_string(integer->get());
  }
  if (const auto* real = node.as_floating_point()) {
    return number_text(real->get());
  }
  tessera::fail(file, ": \"", key,
                "\" must be a string, a number, true or false, or an array of strings or numbers");
}

/// The flag or its --no- form; what has no such form is left out for false.
std::vector<std::string> flag_arguments(bool on, const std::string& key,
                                        const CLI::Option& option) {
  const auto& names = option.get_lnames();
  const bool negates = std::ranges::find(names, "no-" + key) != names.end();
  if (!on && !negates) {
    return {};
  }
  return {(on ? "--" : "--no-") + key};
}

/// An entry as command-line arguments. What takes no value becomes a flag. A list is a flag for
/// each element.
std::vector<std::string> entry_arguments(const toml::node& node, const std::string& key,
                                         const std::string& file, const CLI::App& app) {
  const CLI::Option& option = *app.get_option("--" + key);
  if (const auto* flag = node.as_boolean()) {
    TESSERA_CHECK(option.get_expected_min() == 0, file, ": \"", key, "\" takes a value");
    return flag_arguments(flag->get(), key, option);
  }
  TESSERA_CHECK(option.get_items_expected_max() > 0, file, ": \"", key,
                "\" must be true or false, without quotes");
  std::vector<std::string> arguments;
  const auto add = [&](const toml::node& value) {
    arguments.push_back("--" + key);
    arguments.push_back(file_value(value, key, file));
  };
  if (const auto* list = node.as_array()) {
    TESSERA_CHECK(option.get_items_expected_max() > 1, file, ": \"", key,
                  "\" takes one value, no list");
    TESSERA_CHECK(!list->empty(), file, ": \"", key,
                  "\" is an empty list; give a value, or leave the name out");
    list->for_each(add);
  } else {
    add(node);
  }
  return arguments;
}

/// Whether a flag stands among the arguments, or its --no- form.
bool is_given(const std::string& key, const std::vector<std::string>& arguments) {
  return std::ranges::any_of(arguments, [&](const std::string& argument) {
    const std::string_view name = std::string_view(argument).substr(0, argument.find('='));
    return name == "--" + key || name == "--no-" + key;
  });
}

/// The same, also of a flag that is passed instead of this one.
bool is_decided(const std::string& key, const std::vector<std::string>& arguments,
                const Alternatives& alternatives) {
  return is_given(key, arguments) ||
         std::ranges::any_of(alternatives, [&](const std::vector<std::string>& names) {
           return std::ranges::find(names, key) != names.end() &&
                  std::ranges::any_of(
                      names, [&](const std::string& name) { return is_given(name, arguments); });
         });
}

/// The file's entries as command-line arguments, but for those that the command line decides.
std::vector<std::string> file_arguments(const std::string& file, const CLI::App& app,
                                        const std::vector<std::string>& given,
                                        const Alternatives& alternatives) {
  toml::table table;
  try {
    table = toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    tessera::fail("can't read --config-file ", file, ": ", error.description(), " (line ",
                  error.source().begin.line, ")");
  }
  const std::vector<std::string> names = long_names(app);
  std::vector<std::string> arguments;
  for (const auto& [key_view, node] : table) {
    const std::string key(key_view.str());
    if (std::find(names.begin(), names.end(), key) == names.end()) {
      unknown("name \"" + key + "\" in " + file, key, app);
    }
    TESSERA_CHECK(key != "config-file" && key != "help", file, ": \"", key,
                  "\" is for the command line alone; leave it out here");
    const std::vector<std::string> entry = entry_arguments(node, key, file, app);
    if (!is_decided(key, given, alternatives)) {
      arguments.insert(arguments.end(), entry.begin(), entry.end());
    }
  }
  return arguments;
}

/// The value of --config-file, or "".
/// Read ahead of the parser, which needs the file's entries before it starts.
std::string config_file_of(const std::vector<std::string>& arguments) {
  const std::string flag = "--config-file";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == flag && i + 1 < arguments.size()) {
      return arguments[i + 1];
    }
    if (arguments[i].rfind(flag + "=", 0) == 0) {
      return arguments[i].substr(flag.size() + 1);
    }
  }
  return "";
}

/// `range` ends "a number ...".
CLI::Validator number_check(const std::string& range, const std::function<bool(double)>& holds) {
  const auto check = [range, holds](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
    return is_number && holds(value) ? std::string() : text + " is not a number " + range;
  };
  return {check, range};
}

/// A million is written out.
std::string short_text(double value) {
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::digits10);
  out << value;
  return out.str();
}

template <class Integer>
bool overflows(std::string_view text) {
  text.remove_prefix(text.starts_with('+') ? 1 : 0);
  Integer value = 0;
  return std::from_chars(text.data(), text.data() + text.size(), value).ec ==
         std::errc::result_out_of_range;
}

/// CLI11 takes what C takes, and for a whole number beyond 64 bits the nearest.
void check_form_of_numbers(CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::string name = type.substr(0, type.find(':'));
  if (name != "INT" && name != "UINT" && name != "FLOAT") {
    return;
  }
  option.check(
      [name](const std::string& text) {
        if (!is_decimal(text)) {
          return text + " is not a decimal number";
        }
        const bool too_large = (name == "INT" && overflows<std::int64_t>(text)) ||
                               (name == "UINT" && overflows<std::uint64_t>(text));
        return too_large ? text + " does not fit into 64 bits; give a smaller number"
                         : std::string();
      },
      "");
}

/// With two values, one would be dropped without a word.
void refuse_two_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& values = option->results();
    const auto other = std::ranges::find_if(
        values, [&](const std::string& value) { return value != values.front(); });
    TESSERA_CHECK(option->get_items_expected_max() > 1 || other == values.end(), "--",
                  option->get_single_name(), " is given as ", values.front(), " and as ", *other,
                  ", but has one value; leave one of them out");
  }
}

}  // namespace

bool is_decimal(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789.eE+-") == std::string_view::npos;
}

std::string number_text(double value) {
  std::string text;
  // 17 give every double back.
  for (int digits = 15; digits <= 17 && (text.empty() || std::stod(text) != value); ++digits) {
    std::ostringstream out;
    out.precision(digits);
    out << value;
    text = out.str();
  }
  return text;
}

CLI::Option* add_switch(CLI::App& app, const std::string& names, bool& on,
                        const std::string& help) {
  return app.add_flag(names, on, help)->default_function([&on] { return on ? "true" : "false"; });
}

CLI::Validator hub_name(tessera::HubPart part) {
  // By an Error that passes CLI11: its message ends with a command.
  return {[part](std::string& name) {
            name = tessera::hub_path(name, part);
            return std::string();
          },
          ""};
}

CLI::Validator number_between(double least, double most) {
  return number_check("from " + short_text(least) + " to " + short_text(most),
                      [=](double value) { return value >= least && value <= most; });
}

CLI::Validator number_of_at_least_0() {
  return number_check("of at least 0", [](double value) { return value >= 0; });
}

/// What is too small for a normal number is as good as 0.
CLI::Validator number_above_0() {
  return number_check("above 0",
                      [](double value) { return value >= std::numeric_limits<double>::min(); });
}

CLI::Validator number_above_0_to(double most) {
  return number_check("above 0, up to " + short_text(most), [=](double value) {
    return value >= std::numeric_limits<double>::min() && value <= most;
  });
}

// "" only where there are no candidates. Of several equally near the first declared wins.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const auto closer = [&](const std::string& a, const std::string& b) {
    return edit_distance(word, a) < edit_distance(word, b);
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(), closer);
  return best == candidates.end() ? "" : *best;
}

void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const Alternatives& alternatives) {
  // For options that are declared later; the loop is for those that are there.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  for (CLI::Option* option : app.get_options()) {
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    check_form_of_numbers(*option);
  }
  // CLI11's own error for an unknown name suggests none.
  app.allow_extras();
  const std::string file = config_file_of(arguments);
  if (!file.empty()) {
    const std::vector<std::string> all = file_arguments(file, app, arguments, alternatives);
    arguments.insert(arguments.begin(), all.begin(), all.end());
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
  try {
    app.parse(arguments);
    // --help is no error; the caller prints and ends.
  } catch (const CLI::CallForHelp&) {
    throw;
  } catch (const CLI::ParseError& error) {
    tessera::fail(error.what(), " (--help lists the flags)");
  }
  if (!app.remaining().empty()) {
    const std::string extra = app.remaining().front();
    unknown((extra.rfind('-', 0) == 0 ? "flag " : "argument ") + extra,
            extra.substr(std::min(extra.find_first_not_of('-'), extra.size())), app);
  }
  refuse_two_values(app);
}

/// CLI11 reports --help as an exception; the usage text has been printed by the parser's caller.
int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>)) {
  try {
    const int status = body(std::vector<std::string>(argv + 1, argv + argc));
    TESSERA_CHECK(std::cout.flush(),
                  "standard output can't be written: is the disk full, or its reader gone?");
    return status;
  } catch (const CLI::CallForHelp&) {
    return 0;
  } catch (const std::exception& error) {
    tessera::end_program(name, error.what());
  }
}

}  // namespace llama

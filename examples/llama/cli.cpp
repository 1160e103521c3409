#include "examples/llama/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <functional>
#include <iostream>
#include <limits>
#include <sstream>

#include "examples/llama/config_file.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"

namespace llama {
namespace {

/// `range` ends "a number ...".
CLI::Validator number_check(const std::string& range, const std::function<bool(double)>& holds) {
  const auto check = [range, holds](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
    return is_number && holds(value) ? std::string() : text + " is not a number " + range;
  };
  return {check, range};
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

/// What is the same for all programs, and for every flag of one.
void prepare(CLI::App& app, const std::vector<FlagNames>& alternatives) {
  app.option_defaults()->group(app.get_help_ptr()->get_group());
  app.set_help_all_flag("--help-all", "Print all flags, by the sections of --config-file");
  declare_config_file(app, alternatives);
  for (CLI::Option* option : app.get_options()) {
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    check_form_of_numbers(*option);
  }
  // CLI11's own error for an unknown name suggests none.
  app.allow_extras();
}

/// CLI11 shows no flags without a group.
void leave_out_of_help(CLI::App& app, const FlagNames& first) {
  for (CLI::Option* option : app.get_options()) {
    const bool is_first = std::ranges::find(first, option->get_single_name()) != first.end();
    if (!first.empty() && option->get_configurable() && !is_first) {
      option->group("");
    }
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

CLI::Validator hub_name(tessera::HubItem item) {
  // By an Error that passes CLI11: its message ends with a command.
  return {[item](std::string& name) {
            name = tessera::hub_path(name, item);
            return std::string();
          },
          ""};
}

CLI::Validator number_between(double least, double most) {
  return number_check("from " + number_text(least) + " to " + number_text(most),
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
  return number_check("above 0, up to " + number_text(most), [=](double value) {
    return value >= std::numeric_limits<double>::min() && value <= most;
  });
}

// "" only where there are no candidates. Of several equally near the first declared wins.
void fail_unknown(const std::string& what, std::string_view name, const CLI::App& app) {
  FlagNames names;
  for (const CLI::Option* option : app.get_options()) {
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  tessera::fail("unknown ", what, "; did you mean --", nearest(name, names), "? (",
                app.get_help_all_ptr() == nullptr ? "--help" : "--help-all", " lists all)");
}

void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const std::vector<FlagNames>& alternatives, const FlagNames& first) {
  prepare(app, alternatives);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
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
                  "; give a file that can be read");
  } catch (const CLI::ParseError& error) {
    tessera::fail(error.what(), " (--help lists the flags)");
  }
  if (!app.remaining().empty()) {
    const std::string extra = app.remaining().front();
    fail_unknown((extra.rfind('-', 0) == 0 ? "flag " : "argument ") + extra,
                 extra.substr(std::min(extra.find_first_not_of('-'), extra.size())), app);
  }
  refuse_two_values(app);
}

int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>)) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is an error of the write, with its line
  try {
    const int status = body(std::vector<std::string>(argv + 1, argv + argc));
    TESSERA_CHECK(std::cout.flush(),
                  "standard output can't be written: is the disk full, or its reader gone?");
    return status;
  } catch (const CLI::Success&) {
    return 0;  // --help
  } catch (const std::exception& error) {
    tessera::end_program(name, error.what());
  }
}

}  // namespace llama

// What all programs do with their command line, whatever their options are.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/hub_cache.h"
#include "tessera/core/text.h"

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace llama {

/// Names of flags, without their dashes.
using FlagNames = std::vector<std::string>;

/// Parses `arguments` (without the program's name) into the options declared on `app`. Adds
/// `--config-file FILE.toml`, whose sections are the options' groups (CLI::Option::group): see
/// config_file.h. `alternatives`: flags that exclude each other. `first`: the flags that
/// --help shows, while --help-all shows all; {}: --help shows all. Unknown names are errors that
/// give the nearest valid one, and so are two values of a flag that has one. Throws tessera::Error;
/// CLI11's Success passes, behind the help that is asked for.
void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const std::vector<FlagNames>& alternatives = {},
                        const FlagNames& first = {});

/// Throws the error of a name that is no flag: `what` says where it stands.
[[noreturn]] void fail_unknown(const std::string& what, std::string_view name, const CLI::App& app);

/// Runs a program's body with its command line, and returns the exit code that it returns. A
/// failure is one line on stderr, "program: message", and the exit code 1.
int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>));

/// Whether a text has only what decimal numbers have: neither C's other forms, such as 0x1p40, nor
/// separators of digits. Options of numbers take no other.
bool is_decimal(std::string_view text);

/// In as few digits as give the number back, at least 15: 0.1 is "0.1".
std::string number_text(double value);

/// A flag without a value, which sets `on`; with the form that unsets it, "--sp,!--no-sp". Unlike
/// CLI11's own its default can be asked for.
CLI::Option* add_switch(CLI::App& app, const std::string& names, bool& on, const std::string& help);

/// Checks of an option's number: finite, and within the bounds, which count themselves. Unlike
/// CLI11's they refuse NaN, and say the bounds in few digits.
CLI::Validator number_between(double least, double most);
CLI::Validator number_of_at_least_0();
CLI::Validator number_above_0();
/// Above 0, `most` included.
CLI::Validator number_above_0_to(double most);

/// For an option that names a model or a part of one: a name on Hugging Face's hub becomes the path
/// in the hub's cache (tessera::hub_path).
CLI::Validator hub_name(tessera::HubItem item);

using tessera::nearest;

}  // namespace llama

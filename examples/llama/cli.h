// What both programs do with their command line, whatever their options are.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/hub_cache.h"

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace llama {

/// Groups of flags, without their dashes, of which a run takes one.
using Alternatives = std::vector<std::vector<std::string>>;

/// Parses `arguments` (without the program's name) into the options declared on `app`. A
/// `--config-file FILE.toml` holds the same names; flags on the command line win over it, also over
/// their alternatives there. Unknown names are errors that give the nearest valid one, and so are
/// two values of a flag that has one. Throws tessera::Error; CLI::CallForHelp passes.
void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const Alternatives& alternatives = {});

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

/// A flag that is for some runs only.
struct FlagUse {
  const char* flag;   ///< "--momentum"
  bool used;          ///< by this run
  const char* where;  ///< what it is for, in words: "--optimizer sgd and muon"
};

/// Checks of an option's number: finite, and within the bounds, which count themselves. Unlike
/// CLI11's they refuse NaN, and say the bounds in few digits.
CLI::Validator number_between(double least, double most);
CLI::Validator number_of_at_least_0();
CLI::Validator number_above_0();
/// Above 0, `most` included.
CLI::Validator number_above_0_to(double most);

/// For an option that names a model or a part of one: a name on Hugging Face's hub becomes the path
/// in the hub's cache (tessera::hub_path).
CLI::Validator hub_name(tessera::HubPart part);

/// The candidate with the fewest edits (Levenshtein distance) from `word`.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace llama

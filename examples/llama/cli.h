// Command-line handling shared by all programs: flags, --config-file, and checks of the files that
// flags name.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/core/error.h"

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace llama {

using FlagNames = std::vector<std::string>;

/// Parses `arguments` (without the program's name) into the options declared on `app`. Adds
/// --config-file, a TOML file with flags (docs/programs/training.md). The command line overrides
/// the file. `alternatives`: lists of flags that exclude each other; a flag of a list on the
/// command line overrides the whole list in the file. `first`: the flags that --help shows; empty:
/// all flags. Throws tessera::Error for a wrong name, section or value. Throws CLI::Success after
/// printing --help or --help-all.
void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const std::vector<FlagNames>& alternatives = {},
                        const FlagNames& first = {});

/// Runs a program's body with its command-line arguments, and returns the body's exit code. A
/// failure prints one line to stderr, "program: message", and returns 1.
int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>));

/// Returns the shortest text that converts back to the same number: 0.1 becomes "0.1".
std::string number_text(double value);

/// Adds a switch that sets `on` to true. `names` can have a second flag that sets `on` to false:
/// "--sp,!--no-sp". `on` keeps its value if neither flag is given.
CLI::Option* add_switch(CLI::App& app, const std::string& names, bool& on, const std::string& help);

/// Returns a check that accepts finite numbers within the bounds, inclusive. Unlike CLI11's checks,
/// this check rejects NaN and prints the bounds with few digits.
CLI::Validator number_between(double least, double most);
CLI::Validator number_of_at_least_0();
CLI::Validator number_above_0();
/// Returns a check that accepts numbers above 0 and at most `most`.
CLI::Validator number_above_0_to(double most);

using tessera::nearest;

/// A flag of a program after parsing, with the user's value or the default value.
struct ResolvedFlag {
  std::string name;
  std::string section;                ///< the flag's section in a configuration file
  std::vector<std::string> values{};  ///< the flag's values; empty if the flag has none
  std::string note{};  ///< reason to omit the flag from a configuration file; "": none
  bool is_list = false, is_number = false, is_switch = false, is_path = false;
};

/// A flag that a configuration file must omit, and the reason.
struct LeftOut {
  std::string name;
  std::string note;
};

/// Returns the values of all flags that a configuration file can have, in the order of --help-all.
/// Paths are absolute. A flag that was not given has the current value of its variable.
std::vector<ResolvedFlag> resolve_flags(CLI::App& app);

/// Sets ResolvedFlag::note of the flags in `left_out`. to_toml() writes these flags as comments.
void leave_out(std::vector<ResolvedFlag>& flags, const std::vector<LeftOut>& left_out);

/// Returns the names and values of the flags that must be equal on all ranks. The value of a flag
/// with a path only shows that the flag is given. Omits --metrics and --tensorboard.
std::map<std::string, std::string> shared_by_ranks(const std::vector<ResolvedFlag>& flags);

/// Returns the flags as the text of a --config-file, divided into sections. Flags that are omitted
/// or have no value become comments.
std::string to_toml(const std::vector<ResolvedFlag>& flags);

struct NamedFile {
  std::string what;  ///< the path's name in errors: "--profile", "run.json of --metrics"
  std::string path;  ///< the path; "": none; an input can be a glob or a model's folder
  bool is_read = false;
};

/// Throws tessera::Error if an output is the same file as another output or an input, also through
/// links. Inputs include a glob's matches and all files in a model's folder.
void check_files_differ(const std::vector<NamedFile>& files);

}  // namespace llama

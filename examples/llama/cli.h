// The command line of all programs: flags, --config-file, the files that flags name.
#pragma once

#include <map>
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
/// `--config-file FILE.toml`, whose sections are the options' groups (CLI::Option::group).
/// `alternatives`: flags that exclude each other. `first`: the flags that
/// --help shows, while --help-all shows all; {}: --help shows all. Unknown names are errors that
/// give the nearest valid one, and so are two values of a flag that has one. Throws tessera::Error;
/// CLI11's Success passes, after the help was printed.
void parse_command_line(CLI::App& app, std::vector<std::string> arguments,
                        const std::vector<FlagNames>& alternatives = {},
                        const FlagNames& first = {});

/// Throws the error for a name that is no flag. `what`: the name with its place.
[[noreturn]] void fail_unknown(const std::string& what, std::string_view name, const CLI::App& app);

/// Runs a program's body with its command line, and returns the exit code that it returns. A
/// failure is one line on stderr, "program: message", and the exit code 1.
int run_program(const char* name, int argc, char** argv, int (*body)(std::vector<std::string>));

/// Whether a text has only the characters of decimal numbers: not 0x1p40, and no separators of
/// digits. Options of numbers accept no other text.
bool is_decimal(std::string_view text);

/// The shortest text, of 15 digits or more, that gives the number back: 0.1 is "0.1".
std::string number_text(double value);

/// A flag without a value, which sets `on`; with the form that unsets it, "--sp,!--no-sp". Unlike
/// CLI11's own its default can be read.
CLI::Option* add_switch(CLI::App& app, const std::string& names, bool& on, const std::string& help);

/// Checks of an option's number: finite, and within the bounds, which are included. Unlike CLI11's
/// they refuse NaN, and print the bounds in few digits.
CLI::Validator number_between(double least, double most);
CLI::Validator number_of_at_least_0();
CLI::Validator number_above_0();
/// Above 0, `most` included.
CLI::Validator number_above_0_to(double most);

/// For an option that names a model or a part of one: a name on Hugging Face's hub becomes the path
/// in the hub's cache (tessera::hub_path).
CLI::Validator hub_name(tessera::HubItem item);

using tessera::nearest;

/// Adds --config-file, with which CLI11 takes flags from a TOML file. Keys are the flags' names, at
/// the top level or in the table that is the flag's group: steps = 3 in [training]. true stands for
/// a flag without a value, an array for a flag that is given several times. A flag on the command
/// line wins, also over its `alternatives` in the file. Throws tessera::Error at parsing, in one
/// line with the file's name: for an unknown name with the nearest valid one, for a key in another
/// section with its own one.
void declare_config_file(CLI::App& app, const std::vector<FlagNames>& alternatives);

/// A flag of a program after parsing, given or not.
struct ResolvedFlag {
  std::string name;                   ///< without its dashes
  std::string section;                ///< in the file: the option's group
  std::vector<std::string> values{};  ///< none: it is not given, and has no default
  std::string note{};                 ///< the reason why a file leaves it out; "": it does not
  bool is_list = false, is_number = false, is_switch = false, is_path = false;
};

/// A flag that a file must leave out, and why.
struct LeftOut {
  std::string name;  ///< without its dashes
  std::string note;
};

/// All flags that a file can have, in the order of --help-all. Files, folders and globs are
/// absolute. Defaults are the current values of the program's variables.
std::vector<ResolvedFlag> resolve_flags(CLI::App& app);

/// Marks the flags that a file leaves out.
void leave_out(std::vector<ResolvedFlag>& flags, const std::vector<LeftOut>& left_out);

/// The values that all ranks of a job must have, by flag, without the outputs of rank 0. Paths may
/// differ: only whether they are given.
std::map<std::string, std::string> shared_by_ranks(const std::vector<ResolvedFlag>& flags);

/// A file for --config-file, in sections. Flags that are left out or have no value are comments.
std::string to_toml(const std::vector<ResolvedFlag>& flags);

/// A file or folder of a program.
struct NamedFile {
  std::string what;  ///< its name in errors: "--profile", "run.json of --metrics"
  std::string path;  ///< "": none; an input may be a glob, or the folder of a model
  bool is_read = false;
};

/// Throws tessera::Error if an output is the same file as another output or an input, also through
/// links. Inputs are also the files that a glob matches, and those of a model in a folder.
void check_files_differ(const std::vector<NamedFile>& files);

}  // namespace llama

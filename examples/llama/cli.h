// What all programs do with their command line: flags, --config-file, the files that flags name.
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
/// `--config-file FILE.toml`, whose sections are the options' groups (CLI::Option::group): see
/// config_file.h. `alternatives`: flags that exclude each other. `first`: the flags that
/// --help shows, while --help-all shows all; {}: --help shows all. Unknown names are errors that
/// give the nearest valid one, and so are two values of a flag that has one. Throws tessera::Error;
/// CLI11's Success passes, after the help was printed.
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
/// CLI11's own its default can be read.
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
  std::string note{};                 ///< why a file must leave it out; "" where it need not
  bool is_list = false, is_number = false, is_switch = false, is_path = false;
};

/// A flag that a file must leave out, and why.
struct LeftOut {
  std::string name;  ///< without its dashes
  std::string note;
};

/// All flags in the order of --help-all, but for those that a file can't have. Files, folders and
/// globs are absolute. Defaults are what the program's variables hold when this is called.
std::vector<ResolvedFlag> resolve_flags(CLI::App& app);

/// Notes what a file must leave out.
void leave_out(std::vector<ResolvedFlag>& flags, const std::vector<LeftOut>& left_out);

/// The values that all ranks of a job must have, by flag: not of what rank 0 alone writes. Of
/// paths, which may differ, only that they are given.
std::map<std::string, std::string> shared_by_ranks(const std::vector<ResolvedFlag>& flags);

/// As --config-file reads it, in sections: what it must leave out, or what has no value, is a
/// comment.
std::string to_toml(const std::vector<ResolvedFlag>& flags);

/// A file or folder of a program.
struct NamedFile {
  std::string what;  ///< as an error says it: "--profile", "run.json of --metrics"
  std::string path;  ///< "": none; of what is read also a glob, or the folder of a model
  bool is_read = false;
};

/// Throws tessera::Error where two of them are one, however they are written and by whatever links,
/// and one of these is written: it would replace the other, or be written into it. What is read are
/// also the files that a glob matches, and those of a model in a folder.
void check_files_differ(const std::vector<NamedFile>& files);

}  // namespace llama

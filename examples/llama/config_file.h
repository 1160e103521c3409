// Flags in a file: read from --config-file run.toml, and written there, so that the file starts the
// same run again.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "examples/llama/cli.h"

namespace llama {

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

}  // namespace llama

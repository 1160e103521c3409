// What a run was started with, flag by flag: for its report, and as a file that starts it again.

#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace llama {

/// A flag of a program after parsing, given or not.
struct ResolvedFlag {
  std::string name;                   ///< without its dashes
  std::vector<std::string> values{};  ///< none: it is not given, and has no default
  std::string note{};                 ///< why a file must leave it out; "" where it need not
  bool is_list = false, is_number = false, is_switch = false;
};

/// A flag that a file must leave out, and why.
struct LeftOut {
  std::string name;  ///< without its dashes
  std::string note;
};

/// All flags in the order of --help, but for --help and --config-file. Files, folders and globs are
/// absolute. Defaults are what the program's variables hold when this is called.
std::vector<ResolvedFlag> resolve_flags(CLI::App& app);

/// Notes what a file must leave out.
void leave_out(std::vector<ResolvedFlag>& flags, const std::vector<LeftOut>& left_out);

/// As --config-file reads it: what it must leave out, or what has no value, is a comment.
std::string to_toml(const std::vector<ResolvedFlag>& flags);

}  // namespace llama

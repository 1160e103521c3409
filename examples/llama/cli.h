#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace llama {

/// Parses `arguments` (without the program's name) into the options declared on `app`. A
/// `--config-file FILE.toml` holds the same names; flags on the command line win over it. Unknown
/// names are errors that give the nearest valid one. Throws tessera::Error; CLI::CallForHelp
/// passes.
void parse_command_line(CLI::App& app, std::vector<std::string> arguments);

/// Runs a program's body with its command line. A failure is one line on stderr, "program:
/// message", and the exit code 1.
int run_program(const char* name, int argc, char** argv, void (*body)(std::vector<std::string>));

/// The candidate with the fewest edits (Levenshtein distance) from `word`.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace llama

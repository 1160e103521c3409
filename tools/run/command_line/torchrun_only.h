// Options of torchrun's that tessera-run cannot do: a command line that has one is refused, with
// what to do instead.

#pragma once

namespace CLI {
class App;
}  // namespace CLI

namespace tessera::run {

/// So that their values are not taken for the program. --help does not list them.
void declare_torchrun_only(CLI::App& app);

/// Throws Error where one is given, on the command line or as PET_<NAME>.
void refuse_torchrun_only(const CLI::App& app);

}  // namespace tessera::run

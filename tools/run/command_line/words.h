// A command line's words in two: the launcher's own, and the program with its arguments.

#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}  // namespace CLI

namespace tessera::run {

struct Words {
  std::vector<std::string> own;
  std::vector<std::string> program;  ///< and its arguments, as they were given
};

/// The program begins behind the first "--", or as with torchrun at the first word that is neither
/// an option of `app` nor an option's value. Names of options in `own` have dashes, also where they
/// were written with underscores.
Words split_words(const CLI::App& app, int argc, const char* const* argv);

}  // namespace tessera::run

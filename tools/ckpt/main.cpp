// tessera-ckpt: describes, verifies and compares sharded checkpoints, without ranks. Exit codes: 1
// for a fault (`verify`) or a difference (`diff`); 2 for a wrong command line or an unreadable
// checkpoint; otherwise 0.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/checkpoint/inspect.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// A handler that prints each warning of libtorch or Tessera on one line.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    std::cerr << "tessera-ckpt: warning: " + warning.msg() + "\n";
  }
};

struct Arguments {
  std::string path;
  std::string other;  ///< the second checkpoint of the command `diff`
};

int info(const Arguments& arguments) {
  std::cout << describe_step(find_step(arguments.path));
  return 0;
}

int verify(const Arguments& arguments) {
  const fs::path folder = find_step(arguments.path);
  const auto faults = verify_step(folder);
  for (const std::string& fault : faults) {
    std::cout << fault << '\n';
  }
  std::cout << fmt::format(
      "{}: {}\n", folder.string(),
      faults.empty() ? "every byte is as it was written"
                     : fmt::format("{} fault{}", faults.size(), faults.size() == 1 ? "" : "s"));
  return faults.empty() ? 0 : 1;
}

int diff(const Arguments& arguments) {
  const auto differences = compare_steps(find_step(arguments.path), find_step(arguments.other));
  for (const std::string& difference : differences) {
    std::cout << difference << '\n';
  }
  if (differences.empty()) {
    std::cout << "the tensors are equal\n";
  }
  return differences.empty() ? 0 : 1;
}

int run(int argc, char** argv) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  CLI::App app("Describes, verifies and compares sharded checkpoints.", "tessera-ckpt");
  app.require_subcommand(1);
  Arguments arguments;
  int code = 0;
  const auto add = [&](const char* name, const char* help, int (*command)(const Arguments&)) {
    CLI::App* added = app.add_subcommand(name, help);
    added->add_option("STEP", arguments.path, "A step, or a folder of steps: the newest is used")
        ->required();
    added->callback([&arguments, &code, command] { code = command(arguments); });
    return added;
  };
  add("info", "Describes the content of a step", info);
  add("verify", "Compares every byte of a step with its checksum", verify);
  add("diff", "Lists the tensors that differ between two steps", diff)
      ->add_option("OTHER", arguments.other, "The other step")
      ->required();
  const std::vector<std::string> names{"info", "verify", "diff"};
  const std::string first = argc > 1 ? argv[1] : "-";
  TESSERA_CHECK(first[0] == '-' || std::ranges::find(names, first) != names.end(),
                "unknown subcommand '", first, "'; did you mean ", nearest(first, names),
                "? (tessera-ckpt --help lists all)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return code;
}

}  // namespace
}  // namespace tessera::checkpoint

int main(int argc, char** argv) {
  // SIGXFSZ is ignored, so that a write above the file-size limit fails with an error message.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    const int code = tessera::checkpoint::run(argc, argv);
    tessera::files::flush_output();
    return code;
  } catch (const std::exception& error) {
    std::cerr << "tessera-ckpt: " << error.what() << '\n';
    return 2;
  }
}

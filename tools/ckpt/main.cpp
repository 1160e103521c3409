// tessera-ckpt: looks at sharded checkpoints, compares and exports them, without ranks; moves them
// to and from object stores.
// Exit codes: 0; 1 if `verify` finds a fault or `diff` a difference; 2 if the command line or a
// checkpoint is wrong.

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/object_store.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/hub_cache.h"
#include "tessera/core/input_file.h"
#include "tessera/core/text.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMaxConfigBytes = 10'000'000;
const std::map<std::string, c10::ScalarType> kTypes = {
    {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}, {"fp16", c10::kHalf}};

/// A line each, as the errors are.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    std::cerr << "tessera-ckpt: warning: " + warning.msg() + "\n";
  }
};

struct Arguments {
  std::string path;
  std::string other;  ///< the second step, or the folder of an export
  std::string config;
  std::string model;
  std::string dtype = "fp32";
  StoreCommands store;
  std::string prefix;
};

/// On a terminal, one line that is written again and again.
Progress shown_progress() {
  if (isatty(STDERR_FILENO) == 0) {
    return {};
  }
  return [](std::uint64_t done, std::uint64_t all) {
    std::cerr << fmt::format("\r{} of {} MiB{}", done >> 20, all >> 20, done == all ? "\n" : "");
  };
}

int info(const Arguments& arguments) {
  std::cout << describe_step(find_step(arguments.path));
  return 0;
}

int verify(const Arguments& arguments) {
  const fs::path folder = find_step(arguments.path);
  const auto faults = verify_step(folder, shown_progress());
  for (const std::string& fault : faults) {
    std::cout << fault << '\n';
  }
  std::cout << fmt::format(
      "{}: {}\n", folder.string(),
      faults.empty() ? "every byte is as it was written" : fmt::format("{} faults", faults.size()));
  return faults.empty() ? 0 : 1;
}

/// Whether it has a manifest, or steps.
bool is_checkpoint(const fs::path& folder) {
  std::error_code missing;
  return std::ranges::any_of(fs::directory_iterator(folder, missing), [](const auto& entry) {
    const std::string name = entry.path().filename().string();
    return name == "manifest.json" || name.starts_with("step-");
  });
}

int export_hf(const Arguments& arguments) {
  const fs::path folder = find_step(arguments.path);
  TESSERA_CHECK(arguments.config.empty() || arguments.model.empty(),
                "--config and --model are both given; pass one of them");
  TESSERA_CHECK(!arguments.config.empty() || !arguments.model.empty(),
                "export-hf needs the config.json of the model: pass --config FILE, or --model DIR "
                "to copy the tokenizer's files as well");
  const std::string model = hub_path(arguments.model, HubItem::kModel);
  const fs::path config_file = model.empty()
                                   ? fs::path(hub_path(arguments.config, HubItem::kConfig))
                                   : fs::path(model) / "config.json";
  const std::string config =
      files::read_file(config_file, "a Hugging Face config.json", kMaxConfigBytes);
  std::error_code missing;
  TESSERA_CHECK(model.empty() || !fs::equivalent(model, arguments.other, missing), "export-hf to '",
                arguments.other,
                "' would replace the weights of --model, which is the same folder; name another");
  // PyTorch's shards have no manifest.
  const bool is_step = fs::equivalent(folder, arguments.other, missing);
  TESSERA_CHECK(!is_step && !is_checkpoint(arguments.other), "export-hf to '", arguments.other,
                "' would write into a checkpoint, which has no other files; name another folder");
  std::optional<FilesBesideWeights> beside;
  if (!model.empty()) {
    beside = files_beside_weights(model);
  }
  export_hugging_face(folder, arguments.other, config, kTypes.at(arguments.dtype), shown_progress(),
                      beside);
  std::cout << fmt::format("{}: the weights are in {}\n", folder.string(), arguments.other);
  return 0;
}

int diff(const Arguments& arguments) {
  const auto differences =
      compare_steps(find_step(arguments.path), find_step(arguments.other), shown_progress());
  for (const std::string& difference : differences) {
    std::cout << difference << '\n';
  }
  if (differences.empty()) {
    std::cout << "the tensors are equal\n";
  }
  return differences.empty() ? 0 : 1;
}

// push and pull may be run by several ranks, which share the files.

int push(const Arguments& arguments) {
  const comm::WorldScope scope(comm::world_from_environment({}));
  const auto store = command_store(arguments.store);
  const std::int64_t step = push_step(*scope.world(), arguments.path, *store, arguments.prefix);
  if (scope.world()->rank() == 0) {
    std::cout << fmt::format("step {} is in the store\n", step);
  }
  return 0;
}

int pull(const Arguments& arguments) {
  const comm::WorldScope scope(comm::world_from_environment({}));
  const auto store = command_store(arguments.store);
  const fs::path folder = pull_step(*scope.world(), *store, arguments.prefix, arguments.path);
  if (scope.world()->rank() == 0) {
    std::cout << fmt::format("{}: pulled\n", folder.string());
  }
  return 0;
}

CLI::App& declare_store(CLI::App& app, Arguments& arguments, const char* move,
                        std::string& command) {
  app.add_option(move, command, "The command that moves one file, with {file} and {key}")
      ->required();
  app.add_option("--list", arguments.store.list,
                 "The command that prints a line BYTES KEY for each object whose key begins with "
                 "{key}")
      ->required();
  app.add_option("--prefix", arguments.prefix, "What the keys of the run's steps begin with");
  return app;
}

int run(int argc, char** argv) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  CLI::App app("Looks at sharded checkpoints, compares, exports and moves them.", "tessera-ckpt");
  app.require_subcommand(1);
  Arguments arguments;
  std::map<const CLI::App*, int (*)(const Arguments&)> commands;
  const auto add = [&](const char* name, const char* help, int (*command)(const Arguments&),
                       const char* path = "A step, or a folder of steps: then the newest") {
    CLI::App* added = app.add_subcommand(name, help);
    added->add_option(path[0] == 'A' ? "STEP" : "DIR", arguments.path, path)->required();
    commands.emplace(added, command);
    return added;
  };
  add("info", "What a step holds", info);
  add("verify", "Compares every byte of a step with its checksum", verify);
  CLI::App* exporting = add("export-hf", "Writes the weights as a Hugging Face folder", export_hf);
  exporting->add_option("OUT", arguments.other, "The folder to be written")->required();
  exporting->add_option("--config", arguments.config, "The config.json of the model");
  exporting->add_option("--model", arguments.model,
                        "A Hugging Face folder whose config.json and tokenizer's files are taken");
  exporting
      ->add_option("--dtype", arguments.dtype, "Type of the weights: fp32, bf16 or fp16 (fp32)")
      ->check(CLI::IsMember(kTypes));
  add("diff", "Says in which tensors two steps differ", diff)
      ->add_option("OTHER", arguments.other, "The other step")
      ->required();
  declare_store(*add("push", "Puts a step into an object store", push), arguments, "--put",
                arguments.store.put)
      .add_option("--get", arguments.store.get,
                  "That of pull: makes sure that a step which --list does not print is not there");
  declare_store(*add("pull", "Gets the newest step from an object store", pull,
                     "The folder of the run's steps"),
                arguments, "--get", arguments.store.get);
  std::vector<std::string> names;
  for (const auto& [command, unused] : commands) {
    names.push_back(command->get_name());
  }
  const std::string first = argc > 1 ? argv[1] : "-";
  TESSERA_CHECK(first[0] == '-' || std::ranges::find(names, first) != names.end(),
                "unknown subcommand '", first, "'; did you mean ", nearest(first, names),
                "? (tessera-ckpt --help lists all)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return commands.at(app.get_subcommands()[0])(arguments);
}

}  // namespace
}  // namespace tessera::checkpoint

int main(int argc, char** argv) {
  // A file that grows beyond the limit of its size is then an error, with its line.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return tessera::checkpoint::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "tessera-ckpt: " << error.what() << '\n';
    return 2;
  }
}

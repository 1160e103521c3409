// The flags of vit_train.

#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include "examples/vit/vit.h"

namespace vit {

struct Options {
  Config config{};
  training::CheckpointOptions checkpoints{.every = 50, .steps = 100, .keep = 2};
  std::string config_file{}, metrics{}, save_hf{}, gpu{};
  std::int64_t batch = 64, dp = 1, tp = 1;
  double lr = 1e-3;
  bool plan = false, json = false;

  /// The values that must be equal on all ranks; for folders, whether they are given.
  std::map<std::string, std::string> shared() const {
    return {{"--config", nlohmann::json(config).dump()},
            {"--steps", std::to_string(checkpoints.steps)},
            {"--batch", std::to_string(batch)},
            {"--dp", std::to_string(dp)},
            {"--tp", std::to_string(tp)},
            {"--lr", nlohmann::json(lr).dump()},
            {"--checkpoint", checkpoints.folder.empty() ? "" : "DIR"},
            {"--checkpoint-every", std::to_string(checkpoints.every)},
            {"--resume", checkpoints.resume == training::Resume::kAuto ? "given" : ""},
            {"--save-hf", save_hf.empty() ? "" : "DIR"}};
  }
};

/// What is written must not replace what is read.
inline void check_outputs(const Options& o) {
  const std::map<std::string, std::string> outputs{
      {"--metrics", o.metrics}, {"--checkpoint", o.checkpoints.folder}, {"--save-hf", o.save_hf}};
  for (const auto& [flag, path] : outputs) {
    std::error_code none;
    TESSERA_CHECK(path.empty() || !std::filesystem::equivalent(path, o.config_file, none), flag,
                  " is ", path, ", the file of --config: give another name");
  }
}

/// nullopt after --help, which it prints. Throws Error and CLI::ParseError for what no run
/// can have.
inline std::optional<Options> parse(int argc, char** argv) {
  Options o;
  o.checkpoints.names = {.program = "vit_train", .dashes = "--"};
  CLI::App app("Trains a vision transformer on images of stripes");
  const CLI::Range positive(1, 1 << 24), natural(0, 1 << 24);
  app.add_option("--config", o.config_file, "JSON file with the sizes of the model");
  app.add_option("--steps", o.checkpoints.steps, "of the whole run")->check(natural);
  app.add_option("--batch", o.batch, "images of all ranks in a step")->check(positive);
  app.add_option("--dp", o.dp, "ranks of FSDP")->check(positive);
  app.add_option("--tp", o.tp, "ranks of tensor parallelism")->check(positive);
  app.add_option("--lr", o.lr, "highest learning rate")->check(CLI::Range(1e-12, 1e6));
  app.add_option("--metrics", o.metrics, "JSONL file, one line a step");
  app.add_option("--checkpoint", o.checkpoints.folder, "folder of steps");
  app.add_option("--checkpoint-every", o.checkpoints.every, "steps; 0: only at the end")
      ->check(natural)
      ->needs("--checkpoint");
  app.add_flag_callback(
         "--resume", [&] { o.checkpoints.resume = training::Resume::kAuto; },
         "continue from the newest step, if there is one")
      ->needs("--checkpoint");
  app.add_option("--save-hf", o.save_hf, "folder for config.json and model.safetensors");
  app.add_flag("--plan", o.plan, "print what each rank would hold and send, and end");
  app.add_option("--gpu", o.gpu, "what it is planned for, with times: h100, ..., or a file")
      ->needs("--plan");
  app.add_flag("--json", o.json, "print the plan as JSON")->needs("--plan");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  }
  check_outputs(o);
  if (!o.config_file.empty()) {
    o.config = read_config(o.config_file);
  }
  return o;
}

}  // namespace vit

#include "examples/llama/train/options/outputs.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "examples/llama/train/options/sections.h"

namespace llama {

// The command line has them also where the options of a plan leave them out.
std::vector<NamedFile> read_files(const CLI::App& app) {
  std::vector<NamedFile> files;
  for (const char* flag : {"--model", "--config", "--text", "--tokens", "--jsonl", "--tokenizer",
                           "--eval-text", "--eval-tokens", "--initial-load", "--config-file"}) {
    for (const std::string& file : app.get_option(flag)->results()) {
      files.push_back({flag, file, /*is_read=*/true});
    }
  }
  return files;
}

std::vector<LeftOut> place_outputs(const CLI::App& app, TrainOptions& o) {
  if (o.output_dir.empty()) {
    return {};
  }
  std::vector<LeftOut> placed{{"output-dir", "another run needs another one"}};
  const auto place = [&](const char* flag, std::string& output, const char* name) {
    if (app.get_option(std::string("--") + flag)->count() == 0) {
      output = std::filesystem::path(o.output_dir) / name;
      placed.push_back({flag, "in --output-dir"});
    }
  };
  place("metrics", o.metrics, "metrics.jsonl");
  place("tensorboard", o.tensorboard, "tensorboard");
  const bool saves = o.checkpoint_every > 0 || o.keep > 0 || resumes(o);
  if (saves) {
    place("checkpoint", o.checkpoint, "checkpoints");
  }
  return placed;
}

std::filesystem::path report_file(const TrainOptions& o) {
  const std::filesystem::path folder = o.output_dir.empty()
                                           ? std::filesystem::path(o.metrics).parent_path()
                                           : std::filesystem::path(o.output_dir);
  return folder / "report.html";
}

void check_outputs(const TrainOptions& o) {
  std::vector<NamedFile> files = o.inputs;
  const std::string report = o.metrics.empty() ? "" : report_file(o).string();
  // A resumed run writes config-2.toml, or the next that is not there.
  const bool writes_flags = !o.output_dir.empty() && !resumes(o);
  const std::string flags = writes_flags ? o.output_dir + "/config.toml" : "";
  for (const NamedFile& written : {NamedFile{"--output-dir", o.output_dir},
                                   {"config.toml of --output-dir", flags},
                                   {"--metrics", o.metrics},
                                   {"report.html of --metrics", report},
                                   {"--trace", o.trace},
                                   {"--profile", o.profile},
                                   {"--memory-report", o.memory_report},
                                   {"--tensorboard", o.tensorboard},
                                   {"--checkpoint", o.checkpoint},
                                   {"--save-hf", o.save_hf},
                                   {"--save-lora", o.save_lora}}) {
    files.push_back(written);
  }
  check_files_differ(files);
}

}  // namespace llama

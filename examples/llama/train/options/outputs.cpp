#include "examples/llama/train/options/outputs.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "examples/llama/named_files.h"

namespace llama {

namespace {

/// The files; folders of models and checkpoints are checked where they are opened.
std::vector<NamedFile> read_files(const CLI::App& app, const TrainOptions& o) {
  std::vector<NamedFile> files{{"--config", o.config},
                               {"--text", o.text},
                               {"--tokenizer", o.tokenizer},
                               {"--eval-text", o.eval_text},
                               {"--eval-tokens", o.eval_tokens}};
  for (const std::string& file : o.tokens) {
    files.push_back({"--tokens", file});
  }
  for (const std::string& file : o.jsonl) {
    files.push_back({"--jsonl", file});
  }
  for (const std::string& file : app.get_option("--config-file")->results()) {
    files.push_back({"--config-file", file});
  }
  for (NamedFile& file : files) {
    file.is_read = true;
  }
  return files;
}

}  // namespace

std::filesystem::path report_file(const TrainOptions& o) {
  const std::filesystem::path folder = o.output_dir.empty()
                                           ? std::filesystem::path(o.metrics).parent_path()
                                           : std::filesystem::path(o.output_dir);
  return folder / "report.html";
}

void check_outputs(const CLI::App& app, const TrainOptions& o) {
  std::vector<NamedFile> files = read_files(app, o);
  const std::string report = o.metrics.empty() ? "" : report_file(o).string();
  const std::string flags = o.output_dir.empty() ? "" : o.output_dir + "/config.toml";
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

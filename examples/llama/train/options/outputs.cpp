#include "examples/llama/train/options/outputs.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "examples/llama/named_files.h"

namespace llama {

// The command line has them also where the options of a plan leave them out.
std::vector<NamedFile> read_files(const CLI::App& app) {
  std::vector<NamedFile> files;
  for (const char* flag : {"--model", "--config", "--text", "--tokens", "--jsonl", "--tokenizer",
                           "--eval-text", "--eval-tokens", "--config-file"}) {
    for (const std::string& file : app.get_option(flag)->results()) {
      files.push_back({flag, file, /*is_read=*/true});
    }
  }
  return files;
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

#include "examples/llama/train/run_folder.h"

#include <filesystem>
#include <string>

#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// "" for a folder without one.
std::string file_of_a_run(const std::filesystem::path& folder) {
  for (const char* name : {"config.toml", "metrics.jsonl", "report.html"}) {
    if (std::filesystem::exists(folder / name)) {
      return name;
    }
  }
  return "";
}

std::string text_of(const std::string& to_use_it, const TrainOptions& options) {
  return "# The flags of a run of llama_train, given or not. " + to_use_it + options.resolved;
}

}  // namespace

void take_run_folder(const TrainOptions& options) {
  const std::filesystem::path folder(options.output_dir);
  tessera::files::create_folders(folder);
  const std::string text =
      text_of("To make it again:\n# llama_train --config-file THIS_FILE --output-dir NEW_FOLDER\n",
              options);
  if (!resumes(options)) {
    std::string found = file_of_a_run(folder);
    // If two runs begin at the same time, one of them writes it.
    if (found.empty() && !tessera::files::write_new_file(folder / "config.toml", text)) {
      found = "config.toml";
    }
    TESSERA_CHECK(found.empty(), "--output-dir ", folder.string(), " has a run already (", found,
                  "); give a new folder, or --resume to continue that run");
    return;
  }
  if (tessera::files::write_new_file(folder / "config.toml", text)) {
    return;
  }
  const std::string resumed = text_of(
      "To continue it once more:\n# llama_train --config-file THIS_FILE --output-dir THIS_FOLDER\n",
      options);
  const auto name = [](int i) { return "config-" + std::to_string(i) + ".toml"; };
  for (int i = 2; !tessera::files::write_new_file(folder / name(i), resumed); ++i) {
  }
}

}  // namespace llama

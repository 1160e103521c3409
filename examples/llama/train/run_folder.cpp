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

}  // namespace

void take_run_folder(const TrainOptions& options) {
  const std::filesystem::path folder(options.output_dir);
  tessera::files::create_folders(folder);
  const std::string text =
      "# The flags of a run of llama_train, given or not. To make it again:\n"
      "# llama_train --config-file THIS_FILE --output-dir NEW_FOLDER\n" +
      options.resolved;
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
  std::string name = "config.toml";
  for (int i = 2; !tessera::files::write_new_file(folder / name, text); ++i) {
    name = "config-" + std::to_string(i) + ".toml";
  }
}

}  // namespace llama

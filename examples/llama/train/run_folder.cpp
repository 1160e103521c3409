#include "examples/llama/train/run_folder.h"

#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>

#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

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

/// Without the lines of --resume, with which a run begins and goes on.
std::string flags_of(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("resume") == std::string::npos) {
      kept += line + "\n";
    }
  }
  return kept;
}

/// Whether `config` is of a run with the same flags.
bool has_flags(const std::filesystem::path& config, const std::string& text) {
  constexpr std::uint64_t kMostBytes = 1 << 20;
  return std::filesystem::exists(config) &&
         flags_of(tessera::files::read_file(config, "a run's flags", kMostBytes)) == flags_of(text);
}

/// For a run that begins. With --resume auto it may be one that ended before its first step was
/// saved.
void take_for_a_new_run(const std::filesystem::path& folder, const std::string& text,
                        bool may_begin_again) {
  const std::filesystem::path config = folder / "config.toml";
  const bool begins_again = may_begin_again && has_flags(config, text);
  std::string found = begins_again ? "" : file_of_a_run(folder);
  // If two runs begin at the same time, one of them writes it.
  if (found.empty() && !tessera::files::write_new_file(config, text) && !begins_again) {
    found = "config.toml";
  }
  TESSERA_CHECK(found.empty(), "--output-dir ", folder.string(), " has a run already (", found, ")",
                may_begin_again
                    ? " with other flags, and no checkpoint that --resume auto continues; "
                      "give a new folder"
                    : "; give a new folder, or --resume to continue that run");
}

}  // namespace

void take_run_folder(const TrainOptions& options, bool goes_on) {
  const std::filesystem::path folder(options.output_dir);
  tessera::files::create_folders(folder);
  const std::string text =
      text_of("To make it again:\n# llama_train --config-file THIS_FILE --output-dir NEW_FOLDER\n",
              options);
  if (!goes_on) {
    take_for_a_new_run(folder, text, /*may_begin_again=*/resumes(options));
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

// The files and folders of a run.

#pragma once

#include <filesystem>
#include <vector>

#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

/// What the flags name to be read, by a run or, of a plan, by the run that is planned.
std::vector<NamedFile> read_files(const CLI::App& app);
/// Where report.html of a run with --metrics is written.
std::filesystem::path report_file(const TrainOptions& options);
/// Throws tessera::Error where a run would write two things to one place, or over what it reads.
void check_outputs(const TrainOptions& options);

}  // namespace llama

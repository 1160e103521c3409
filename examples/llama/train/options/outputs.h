// The files and folders of a run.

#pragma once

#include <filesystem>

#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

/// Where report.html of a run with --metrics is written.
std::filesystem::path report_file(const TrainOptions& options);
/// Throws tessera::Error where a run would write two things to one place, or over what it reads.
void check_outputs(const CLI::App& app, const TrainOptions& options);

}  // namespace llama

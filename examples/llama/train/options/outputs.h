#pragma once

#include <filesystem>

#include "examples/llama/train/options/train_options.h"

namespace llama {

/// Where report.html of a run with --metrics is written.
std::filesystem::path report_file(const TrainOptions& options);

}  // namespace llama

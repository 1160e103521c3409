// A plan as a page with pictures.

#pragma once

#include <filesystem>
#include <optional>

#include "examples/llama/plan/plan_report.h"
#include "examples/llama/plan/search.h"

namespace llama {

/// One HTML file with everything in it: what fits, the search's layouts, each kind of rank's memory
/// over the step, what is sent, and a time line. Throws tessera::Error if it can't be written.
void write_plan_page(const RunPlan& plan, const std::optional<Search>& search,
                     const std::filesystem::path& file);

}  // namespace llama

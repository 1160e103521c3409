#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/planning/plan.h"
#include "tessera/planning/search.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// What a page says of a training beside its plan, as text.
struct PageOptions {
  std::string name{};       ///< the model's name, for the title
  std::string settings{};   ///< below the title: the mesh, and what else matters
  std::int64_t layers = 1;  ///< the model's; a second time line shows three of them
  std::vector<std::pair<std::string, std::string>>
      configuration{};  ///< names and values, at the end
};

/// Writes a plan as one HTML file that needs no other: what fits, the search's layouts, each kind
/// of rank's memory over the step, what is sent, and a time line. Throws Error if it can't be
/// written.
void write_plan_page(const RunPlan& plan, const std::optional<Search>& search,
                     const PageOptions& options, const std::filesystem::path& file);

}  // namespace tessera::planning
TESSERA_API_END

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/planning/detail/search.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Returns a plan as JSON over several lines. Values that need a machine are null without one.
/// * Fields of the run: mesh, ranks, device, gpu, room_bytes, offload, fits, verdict, advice.
/// * Fields of the rank with the highest peak: parameters_bytes, gradients_bytes, optimizer_bytes,
///   activations_bytes, peak_bytes, peak_moment, live_at_peak, comm, step_time_s, mfu and others.
/// * `kinds`: for each RankKind the fields of a rank, and others.
/// * `search`, if passed: gpus, gpu, room_bytes, refused, skipped and layouts (as in to_text()).
std::string to_json(const RunPlan& plan, const std::optional<Search>& search = std::nullopt);
/// Returns a plan as text: tables, and advice if the run does not fit into memory.
std::string to_text(const RunPlan& plan);
/// Returns a search as a table with one row per estimated layout; `*` marks FoundLayout::frontier.
/// The refused layouts follow, with the reason.
std::string to_text(const Search& search);

}  // namespace tessera::planning
TESSERA_API_END

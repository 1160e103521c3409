#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/planning/detail/search.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// A plan as JSON over several lines, with the fields mesh, ranks, device, gpu, fits, advice; the
/// values of the rank with the highest peak (parameters_bytes, gradients_bytes, optimizer_bytes,
/// activations_bytes, peak_bytes, peak_moment, live_at_peak, comm, flops, step_time_s, mfu,
/// exposed_s, communication_s); and `kinds` with the same values for each RankKind. With a search,
/// also `search`: gpus, gpu, room_bytes, `layouts` in the order of to_text() (each with dp, tp, cp,
/// ac, zero, accumulate, peak_bytes, peak_moment, step_time_s, exposed_s, tokens_per_s, mfu, fits,
/// frontier), `refused` and `skipped`. Values that need a machine are null without a machine.
std::string to_json(const RunPlan& plan, const std::optional<Search>& search = std::nullopt);
/// Returns a plan as text: tables, and advice if the run does not fit into memory.
std::string to_text(const RunPlan& plan);
/// Returns a search as a table with one row per estimated layout; `*` marks FoundLayout::frontier.
/// The refused layouts follow, with the reason.
std::string to_text(const Search& search);

}  // namespace tessera::planning
TESSERA_API_END

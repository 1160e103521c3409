#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/planning/plan.h"
#include "tessera/planning/search.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// JSON of several lines: mesh, ranks, device, gpu, fits, advice; the keys of the largest rank
/// (parameters_bytes, gradients_bytes, optimizer_bytes, activations_bytes, peak_bytes, peak_moment,
/// live_at_peak, comm, flops, step_time_s, mfu, exposed_s, communication_s); `kinds` with these of
/// each kind of rank; and where there is a search, `search`: gpus, gpu, room_bytes, `layouts` with
/// dp, tp, cp, ac, zero, accumulate, peak_bytes, peak_moment, step_time_s, exposed_s, tokens_per_s,
/// mfu, fits, frontier of each in the order of to_text(), `refused`, `skipped`. What needs a
/// machine is null without one.
std::string to_json(const RunPlan& plan, const std::optional<Search>& search = std::nullopt);
/// Tables, and advice if the plan does not fit.
std::string to_text(const RunPlan& plan);
/// A row for each estimated layout, those on the frontier marked; then the refused ones with the
/// reason.
std::string to_text(const Search& search);
/// "It fits: 61.2 GiB of the 131 GiB that tensors can have of a h200."; "" without a machine.
std::string verdict(const RunPlan& plan);
/// A line for each large part of the peak, the largest first, with what makes it smaller.
std::vector<std::string> advice(const RunPlan& plan);

}  // namespace tessera::planning
TESSERA_API_END

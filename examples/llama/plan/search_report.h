// What a search has found, in words and as JSON.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "examples/llama/plan/search.h"

namespace llama {

/// A row for each layout that was estimated, those on the frontier marked; then those that were
/// not, with the reason.
std::string to_text(const Search& search);
/// gpus, gpu, room_bytes; `layouts`: dp, tp, ac, zero, peak_bytes, peak_moment, step_time_s,
/// exposed_s, tokens_per_s, mfu, fits, frontier of each, in the order of the table; `refused`;
/// `skipped`.
nlohmann::ordered_json to_json(const Search& search);

}  // namespace llama

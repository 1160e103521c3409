// The results as a table, as JSON and as a page.

#pragma once

#include <string>
#include <vector>

#include "examples/bench_mfu/measure.h"

namespace bench {

/// A line of each run, in columns.
std::string to_table(const std::vector<Result>& results);
/// With --peer a line for each of PyTorch's runs.
std::string peers_text(const std::vector<Result>& results);
/// {"runs": [{model, ac, batch, seq, dp, cp, tp, step_time_s, tokens_per_s, peak_flops, mfu,
/// mfu_causal, hfu, active_bytes, reserved_bytes, peer, error}]}; null is what is not known. peer:
/// {eager, compiled}, with step_time_s and tokens_per_s, or error.
std::string to_json(const std::vector<Result>& results);
/// A page that needs no other file: bars of the three shares, with the figures beside them, light
/// or dark as the reader's system is.
std::string to_html(const std::vector<Result>& results, const BenchOptions& options);

}  // namespace bench

// A plan in words, and as JSON.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/plan/rank_plan.h"

namespace llama {

/// What a program like this one makes of a run: its ranks, and the machine, if there is one.
struct RunPlan {
  TrainOptions options;
  std::optional<Machine> machine;
  std::vector<RankPlan> ranks;  ///< one of each kind

  /// The rank with the highest peak.
  const RankPlan& largest() const;
  /// Whether tensors of the purpose are in the host's memory, not in the device's.
  bool on_host(tessera::observe::MemoryKind kind) const;
  /// Whether the largest fits a device of the machine; true without one.
  bool fits() const;
};

/// The keys of the largest rank, with `kinds` for all of them: parameters_bytes, gradients_bytes,
/// optimizer_bytes, activations_bytes, peak_bytes, peak_moment, live_at_peak, comm, flops,
/// step_time_s, mfu, exposed_s, communication_s. What needs a machine is null without one.
nlohmann::ordered_json to_json(const RunPlan& plan);
/// "It fits: 61.2 GiB of the 131 GiB that tensors can have of a h200."; "" without a machine.
std::string verdict(const RunPlan& plan);
/// What takes most of the peak, and what makes it smaller: a line each, the largest first.
std::vector<std::string> advice(const RunPlan& plan);
/// Tables, and what does not fit with what to try.
std::string to_text(const RunPlan& plan);

}  // namespace llama

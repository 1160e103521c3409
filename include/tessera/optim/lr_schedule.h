#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::optim {

enum class Schedule : std::uint8_t { kConstant, kLinear, kCosine };

/// "constant", "linear" or "cosine"; throws Error for anything else.
Schedule parse_schedule(std::string_view name);

/// What the learning rate is multiplied with at each step. torchtitan's conventions, without its
/// stable phase: in step s (0-based) of N with W steps of warm-up,
///   s < W:  (s + 1) / W                          rising, and never 0
///   else, with p = (s - W) / (N - W):
///   constant 1;  linear 1 - p;  cosine (1 + cos(pi p)) / 2
/// so that steps W - 1 and W have the full rate and the last step a small one, not 0. Hugging
/// Face's schedules agree from step W on; their warm-up is s / W: its first step changes nothing.
class LrSchedule {
 public:
  /// Throws Error for negative steps. A warm-up of at least `steps` never ends.
  LrSchedule(Schedule schedule, std::int64_t warmup, std::int64_t steps);
  /// Pure. 0 for linear and cosine at and beyond step N.
  double factor(std::int64_t step) const;

 private:
  Schedule schedule_;
  std::int64_t warmup_;
  std::int64_t steps_;
};

}  // namespace tessera::optim

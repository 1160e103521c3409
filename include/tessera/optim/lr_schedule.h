#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// What the rate does after the warm-up.
enum class Schedule : std::uint8_t { kConstant, kLinear, kCosine, kWsd };

/// "constant", "linear", "cosine" or "wsd"; throws Error for anything else.
Schedule parse_schedule(std::string_view name);

/// How the rate rises, stays and falls.
struct LrScheduleOptions {
  Schedule schedule = Schedule::kConstant;
  std::int64_t warmup = 0;   ///< steps
  std::int64_t steps = 0;    ///< of the whole run; needed unless constant
  double decay_ratio = 0.2;  ///< for kWsd: the last share of the steps, in which it falls
  double min_factor = 0;     ///< what the rate falls to, as a share of the full one
};

/// The factor of the learning rate at each step, for Optimizer::scale_lr. torchtitan's conventions.
/// At step s (from 0) of N, with W steps of warm-up:
///   s < W:  (s + 1) / W                          rising, and never 0
///   else, with p = (s - W) / (N - W):
///   constant 1;  linear 1 - p;  cosine (1 + cos(pi p)) / 2
///   wsd (warm-up, stable, decay; Hu et al. 2024): 1 until the last D = round(decay_ratio N) steps,
///   then linear: (N - s) / D. D is at most N - W, with a warning where that shortens it
/// A factor f that falls is lifted to min_factor + (1 - min_factor) f. So steps W - 1 and W have
/// the full rate, and the last step is not 0. Hugging Face's schedules agree from step W
/// on; their warm-up is s / W, so that their first step changes nothing.
class LrSchedule {
 public:
  /// Throws Error for negative steps and for shares outside [0, 1]. A warm-up of at least `steps`
  /// never ends.
  explicit LrSchedule(const LrScheduleOptions& options);
  /// Pure. After the warm-up min_factor at and beyond step N, unless constant. Throws Error for a
  /// step below 0, and without steps, unless constant.
  double factor(std::int64_t step) const;

 private:
  double falling(std::int64_t step) const;

  LrScheduleOptions options_;
};

}  // namespace tessera::optim
TESSERA_API_END

#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// How the learning rate changes after the warm-up.
enum class Schedule : std::uint8_t { kConstant, kLinear, kCosine, kWsd };

/// The schedule with a name: accepts "constant", "linear", "cosine" or "wsd"; throws Error for
/// anything else.
Schedule parse_schedule(std::string_view name);

/// Options of LrSchedule.
struct LrScheduleOptions {
  Schedule schedule = Schedule::kConstant;
  std::int64_t warmup = 0;  ///< length of the warm-up in steps
  std::int64_t steps = 0;   ///< steps of the whole run; required unless the schedule is constant
  /// The last part of the run in which a kWsd rate falls, as a fraction of the steps.
  double decay_ratio = 0.2;
  double min_factor = 0;  ///< final rate, as a fraction of the full rate
};

/// Computes the factor of the learning rate at each step, for Optimizer::scale_lr, by the formulas
/// of torchtitan. At step s (from 0) of N, with W steps of warm-up:
///   s < W:  (s + 1) / W                          rising, and never 0
///   else, with p = (s - W) / (N - W):
///   constant 1;  linear 1 - p;  cosine (1 + cos(pi p)) / 2
///   wsd (warm-up, stable, decay; Hu et al. 2024): 1 until the last D = round(decay_ratio N) steps,
///   then linear: (N - s) / D. D is at most N - W, with a warning if this limit shortens it
/// A falling factor f is replaced by min_factor + (1 - min_factor) f. So steps W - 1 and W have the
/// full rate, and the last step's rate is not 0. Hugging Face's schedules agree from step W on;
/// their warm-up is s / W, so that their first step changes nothing.
class LrSchedule {
 public:
  /// Throws Error for negative steps and for fractions outside [0, 1]. A warm-up of at least
  /// `steps` never ends.
  explicit LrSchedule(const LrScheduleOptions& options);
  /// The factor at a step, a pure function. At and beyond step N, the end of the run, the factor is
  /// min_factor, unless the schedule is constant or in the warm-up. Throws Error for a step below
  /// 0, and if LrScheduleOptions::steps is missing for a schedule that is not constant.
  double factor(std::int64_t step) const;

 private:
  double falling(std::int64_t step) const;

  LrScheduleOptions options_;
};

}  // namespace tessera::optim
TESSERA_API_END

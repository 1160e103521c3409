// Learning rates as factors of the step, so that one schedule serves all groups and optimizers
// (Optimizer::scale_lr). No state: a resumed run asks for the step that it is at.

#include "tessera/optim/lr_schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

namespace {

constexpr std::array<std::pair<std::string_view, Schedule>, 4> kNames{
    {{"constant", Schedule::kConstant},
     {"linear", Schedule::kLinear},
     {"cosine", Schedule::kCosine},
     {"wsd", Schedule::kWsd}}};

std::string_view name_of(Schedule schedule) {
  return std::ranges::find(kNames, schedule, [](const auto& known) { return known.second; })->first;
}

}  // namespace

Schedule parse_schedule(std::string_view name) {
  for (const auto& [known, schedule] : kNames) {
    if (name == known) {
      return schedule;
    }
  }
  fail("schedule '", name, "' was asked for; there are constant, linear, cosine and wsd");
}

namespace {

std::int64_t asked_decay(const LrScheduleOptions& o) {
  return std::llround(o.decay_ratio * static_cast<double>(o.steps));
}

/// A fall that began within the warm-up would begin below the full rate, with a jump.
std::int64_t decay_steps(const LrScheduleOptions& o) {
  return std::min(asked_decay(o), std::max(o.steps - o.warmup, std::int64_t{0}));
}

}  // namespace

LrSchedule::LrSchedule(const LrScheduleOptions& options) : options_(options) {
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };
  TESSERA_CHECK(options.warmup >= 0 && options.steps >= 0, "a schedule of ", options.steps,
                " steps with a warm-up of ", options.warmup,
                " was asked for; neither may be negative");
  TESSERA_CHECK(is_share(options.decay_ratio) && is_share(options.min_factor),
                "a schedule with decay_ratio ", options.decay_ratio, " and min_factor ",
                options.min_factor, " was asked for; both are from 0 to 1");
  if (options.schedule == Schedule::kWsd && asked_decay(options) > decay_steps(options)) {
    TORCH_WARN("a wsd schedule of ", options.steps, " steps was asked to fall in the last ",
               asked_decay(options), ", but its warm-up takes the first ", options.warmup,
               "; it falls in the last ", decay_steps(options));
  }
}

/// Warm-up does not begin at 0: the first step (0) would do nothing.
double LrSchedule::factor(std::int64_t step) const {
  const LrScheduleOptions& o = options_;
  TESSERA_CHECK(step >= 0, "the rate of step ", step, " was asked for; steps count from 0");
  // Not in the constructor: a run of no steps has a schedule, too. Without steps every rate is 0.
  TESSERA_CHECK(o.schedule == Schedule::kConstant || o.steps > 0, "the rate of step ", step,
                " of a ", name_of(o.schedule),
                " schedule was asked for, which needs the number of the run's ",
                "steps, but that is 0; give LrScheduleOptions::steps");
  if (step < o.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(o.warmup);
  }
  if (o.schedule == Schedule::kConstant) {
    return 1.0;
  }
  // Also if the warm-up is as long as the run, where a quotient would divide by zero.
  const double factor = step >= o.steps ? 0.0 : falling(step);
  return o.min_factor + (1 - o.min_factor) * factor;
}

/// From 1 to 0, for a step between the warm-up and the end.
double LrSchedule::falling(std::int64_t step) const {
  const LrScheduleOptions& o = options_;
  if (o.schedule == Schedule::kWsd) {
    const std::int64_t decay = decay_steps(o);
    const std::int64_t left = o.steps - step;
    return left >= decay ? 1.0 : static_cast<double>(left) / static_cast<double>(decay);
  }
  const double progress =
      static_cast<double>(step - o.warmup) / static_cast<double>(o.steps - o.warmup);
  if (o.schedule == Schedule::kLinear) {
    return 1.0 - progress;
  }
  return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace tessera::optim

#include "tessera/optim/lr_schedule.h"

#include <cmath>
#include <numbers>

#include "tessera/core/error.h"

namespace tessera::optim {

Schedule parse_schedule(std::string_view name) {
  if (name == "constant") return Schedule::kConstant;
  if (name == "linear") return Schedule::kLinear;
  if (name == "cosine") return Schedule::kCosine;
  fail("schedule '", name, "' was asked for; there are constant, linear and cosine");
}

LrSchedule::LrSchedule(Schedule schedule, std::int64_t warmup, std::int64_t steps)
    : schedule_(schedule), warmup_(warmup), steps_(steps) {
  TESSERA_CHECK(warmup >= 0 && steps >= 0, "a schedule of ", steps, " steps with a warm-up of ",
                warmup, " was asked for; neither may be negative");
}

double LrSchedule::factor(std::int64_t step) const {
  if (step < warmup_) return static_cast<double>(step + 1) / static_cast<double>(warmup_);
  if (schedule_ == Schedule::kConstant) return 1.0;
  if (step >= steps_) return 0.0;
  const double progress =
      static_cast<double>(step - warmup_) / static_cast<double>(steps_ - warmup_);
  if (schedule_ == Schedule::kLinear) return 1.0 - progress;
  return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace tessera::optim

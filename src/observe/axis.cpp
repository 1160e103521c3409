#include "tessera/observe/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/observe/text.h"

namespace tessera::observe {

namespace {

/// The smallest of 1, 2, 5 times a power of ten that is at least `value`. With a tolerance, so that
/// a step of 0.2 that was computed a little larger does not become 0.5.
double round_up(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (value <= factor * power * (1 + 1e-9)) {
      return factor * power;
    }
  }
  return 10 * power;
}

}  // namespace

/// Values outside give positions outside of [0, 1].
double Axis::position(double value) const {
  if (logarithmic) {
    return std::log(value / low) / std::log(high / low);
  }
  return (value - low) / (high - low);
}

/// Short where digits would not fit beside the axis.
std::string Axis::label(double tick) const {
  if (logarithmic || std::fabs(tick) >= 1e5) {
    return compact(tick);
  }
  return grouped(tick, decimals);
}

Axis linear_axis(double low, double high, int count) {
  // A constant gets a range around it.
  // True for NaN as well.
  if (!(high > low)) {
    const double margin = std::max(std::fabs(low) * 0.1, 1e-6);
    low -= margin;
    high += margin;
  }
  const double step = round_up((high - low) / count);
  // The ends are rounded outwards to ticks, so that the curve lies between labels.
  Axis axis{.low = std::floor(low / step + 1e-9) * step,
            .high = std::ceil(high / step - 1e-9) * step,
            .decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)))};
  // Ticks by multiplication: sums of steps would drift.
  const auto ticks = std::llround((axis.high - axis.low) / step);
  for (long long i = 0; i <= ticks; ++i) {
    axis.ticks.push_back(axis.low + static_cast<double>(i) * step);
  }
  return axis;
}

/// The ends need not be round. A range within one decade may have two or three ticks.
Axis logarithmic_axis(double low, double high) {
  Axis axis{.low = low, .high = high, .logarithmic = true};
  const double span = std::log10(high / low);
  for (double power = std::pow(10, std::floor(std::log10(low))); power <= high; power *= 10) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      // Over more than three decades powers of ten are enough.
      if (factor != 1 && span > 3) {
        continue;
      }
      const double tick = factor * power;
      if (tick >= low && tick <= high) {
        axis.ticks.push_back(tick);
      }
    }
  }
  return axis;
}

std::string grid_svg(const Axis& axis, double left, double right, const PlaceOfTick& y) {
  std::string svg;
  for (const double tick : axis.ticks) {
    svg += fmt::format(R"(<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                       R"(<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>)",
                       left, right, y(tick), left - 8, y(tick) + 4, axis.label(tick));
  }
  return svg;
}

std::string marks_svg(const Axis& axis, double base, const PlaceOfTick& x) {
  std::string svg;
  for (const double tick : axis.ticks) {
    svg += fmt::format(R"(<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>)"
                       R"(<text x="{0:.1f}" y="{3}" text-anchor="middle">{4}</text>)",
                       x(tick), base, base + 4, base + 18, axis.label(tick));
  }
  return svg;
}

}  // namespace tessera::observe

// Axes of pictures.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// The range of an axis, linear or logarithmic, with round ticks inside it.
struct Axis {
  double low = 0;
  double high = 1;
  bool logarithmic = false;
  std::vector<double> ticks{};
  int decimals = 0;  ///< that labels need to tell the ticks apart

  /// The position of a value on the axis: 0 at `low`, 1 at `high`.
  double position(double value) const;
  /// A tick's label.
  std::string label(double tick) const;
};

/// Covers [low, high] with about `count` ticks at 1, 2 or 5 times a power of ten, the ends among
/// them.
Axis linear_axis(double low, double high, int count);
/// Covers [low, high], both > 0; ticks inside only.
Axis logarithmic_axis(double low, double high);

/// The place of a tick in a picture.
using PlaceOfTick = std::function<double(double tick)>;
/// SVG of the ticks of an axis that goes upwards: lines from `left` to `right`, and labels before
/// them.
std::string grid_svg(const Axis& axis, double left, double right, const PlaceOfTick& y);
/// SVG of the ticks of an axis at the height `base`: marks below it, and labels below these.
std::string marks_svg(const Axis& axis, double base, const PlaceOfTick& x);

}  // namespace tessera::observe
TESSERA_API_END

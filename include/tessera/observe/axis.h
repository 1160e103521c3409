// Axes of pictures.
#pragma once

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

}  // namespace tessera::observe
TESSERA_API_END

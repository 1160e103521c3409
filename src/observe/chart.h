// Curves of the report, as SVG that needs no script and no file beside the report.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::observe {

/// A curve over the steps of a run.
struct Chart {
  std::string title{};
  std::string unit{};                               ///< behind the title and in hover texts
  std::vector<std::pair<double, double>> points{};  ///< (step, value), rising steps
  bool smooth = true;                               ///< a running mean in front of many points
  bool from_zero = false;                           ///< the axis begins at 0
  bool may_be_logarithmic = false;  ///< if the values span more than a decade and a half
};

/// An SVG element: the curve, its running mean where it has many points, axes with labels, and a
/// hover text at each step (or group of steps). Values that are not finite are left out.
std::string chart_svg(const Chart& chart);

}  // namespace tessera::observe

// Charts: axes first, then the curves. Coordinates are those of the viewBox; the page scales the
// whole. Colours and line widths are classes of report_style.h.
#include "chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tessera/observe/axis.h"
#include "tessera/observe/text.h"

namespace tessera::observe {
namespace {

using Points = std::vector<std::pair<double, double>>;

/// In units of the viewBox. The margins hold the labels.
constexpr double kWidth = 560, kHeight = 236;
constexpr double kLeft = 58, kRight = 14, kTop = 10, kBottom = 32;
constexpr double kPlotWidth = kWidth - kLeft - kRight;
constexpr double kPlotHeight = kHeight - kTop - kBottom;
/// More points than a chart has pixels would only make the file larger.
constexpr std::size_t kMaxPoints = 600;
constexpr std::size_t kMaxHoverTexts = 120;
/// Values that span more than this are drawn on a logarithmic axis.
constexpr double kLogarithmicRatio = 30;

/// The least and the greatest point of each of at most kMaxPoints / 2 groups: a peak stays visible.
/// In each group in the order of the steps, so that the line goes forward.
Points thinned(const Points& points) {
  if (points.size() <= kMaxPoints) {
    return points;
  }
  Points result;
  const std::size_t groups = kMaxPoints / 2;
  const auto by_value = [](const auto& a, const auto& b) { return a.second < b.second; };
  for (std::size_t group = 0; group < groups; ++group) {
    const auto begin = points.begin() + static_cast<std::ptrdiff_t>(points.size() * group / groups);
    const auto end =
        points.begin() + static_cast<std::ptrdiff_t>(points.size() * (group + 1) / groups);
    const auto [low, high] = std::minmax_element(begin, end, by_value);
    result.push_back(std::min(*low, *high));
    if (low != high) {
      result.push_back(std::max(*low, *high));
    }
  }
  return result;
}

/// Mean over the points around each point.
/// `reach` points on each side.
Points running_mean(const Points& points, std::size_t reach) {
  // Running sums: the time does not depend on `reach`. Fewer points at the ends.
  std::vector<double> sums(1, 0);
  for (const auto& point : points) {
    sums.push_back(sums.back() + point.second);
  }
  Points result;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t begin = i < reach ? 0 : i - reach;
    const std::size_t end = std::min(points.size(), i + reach + 1);
    const double mean = (sums[end] - sums[begin]) / static_cast<double>(end - begin);
    result.emplace_back(points[i].first, mean);
  }
  return result;
}

/// Draws in the plot's coordinates.
/// `points` are finite and at least one; both arguments outlive the plot.
class Plot {
 public:
  Plot(const Chart& chart, const Points& points) : chart_(chart), points_(points) {
    const auto [low, high] =
        std::minmax_element(points.begin(), points.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    x_ = step_axis(points.front().first, points.back().first);
    y_ = value_axis(low->second, high->second);
  }

  // One point is a dot, as a line of one point is invisible. Many points are a faint line with
  // their mean in front.
  std::string svg() const {
    std::string body = axes();
    if (points_.size() == 1) {
      body += fmt::format(R"(<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="3"/>)",
                          x(points_[0].first), y(points_[0].second));
    } else if (const std::size_t reach = points_.size() / 80; chart_.smooth && reach > 0) {
      body += line(thinned(points_), "raw") + line(thinned(running_mean(points_, reach)), "curve");
    } else {
      body += line(thinned(points_), "curve");
    }
    return fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>)", kWidth,
                       kHeight, escape_html(chart_.title), body, hover_texts());
  }

 private:
  /// Ticks are whole steps, and the curve fills the width. With one step the range is 1, as an axis
  /// cannot be empty.
  static Axis step_axis(double first, double last) {
    Axis axis = linear_axis(first, std::max(last, first + 1), 7);
    axis.low = first;
    axis.high = std::max(last, first + 1);
    std::erase_if(axis.ticks, [&](double tick) {
      return tick < axis.low || tick > axis.high || tick != std::floor(tick);
    });
    axis.decimals = 0;
    return axis;
  }

  // With some room at both ends: logarithmic axes are not rounded outwards to ticks.
  Axis value_axis(double low, double high) const {
    if (chart_.may_be_logarithmic && low > 0 && high / low > kLogarithmicRatio) {
      return logarithmic_axis(low * 0.9, high * 1.1);
    }
    return linear_axis(chart_.from_zero ? std::min(low, 0.0) : low, high, 4);
  }

  double x(double step) const { return kLeft + x_.position(step) * kPlotWidth; }
  // SVG counts downwards.
  double y(double value) const { return kTop + (1 - y_.position(value)) * kPlotHeight; }

  // Horizontal lines across the plot for values; short marks below it for steps.
  std::string axes() const {
    std::string body;
    for (const double tick : y_.ticks) {
      body += fmt::format(R"(<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                          R"(<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>)",
                          kLeft, kWidth - kRight, y(tick), kLeft - 8, y(tick) + 4, y_.label(tick));
    }
    const double base = kTop + kPlotHeight;
    for (const double tick : x_.ticks) {
      body += fmt::format(R"(<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>)"
                          R"(<text x="{0:.1f}" y="{3}" text-anchor="middle">{4}</text>)",
                          x(tick), base, base + 4, base + 18, x_.label(tick));
    }
    return body + fmt::format(R"(<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>)"
                              R"(<text x="{3}" y="{4}" text-anchor="end">step</text>)",
                              kLeft, kWidth - kRight, base, kLeft - 8, base + 18);
  }

  // One decimal: a tenth of a unit cannot be seen, and halves the file.
  std::string line(const Points& points, const char* style) const {
    std::string coordinates;
    for (const auto& [step, value] : points) {
      coordinates += fmt::format("{:.1f},{:.1f} ", x(step), y(value));
    }
    return fmt::format(R"(<polyline class="{}" points="{}"/>)", style, coordinates);
  }

  /// Invisible stripes over the whole height; each shows a dot and a text when pointed at.
  std::string hover_texts() const {
    std::string body;
    const std::size_t count = std::min(points_.size(), kMaxHoverTexts);
    const double width = kPlotWidth / static_cast<double>(count);
    for (std::size_t i = 0; i < count; ++i) {
      // Evenly among the points, the first and the last included.
      const auto& [step, value] = points_[count == 1 ? 0 : (points_.size() - 1) * i / (count - 1)];
      body += fmt::format(R"(<g class="hover"><title>step {0}: {1}{2}</title>)"
                          R"(<rect x="{3:.1f}" y="{4}" width="{5:.1f}" height="{6}"/>)"
                          R"(<circle cx="{7:.1f}" cy="{8:.1f}" r="3.5"/></g>)",
                          grouped(step), compact(value),
                          chart_.unit.empty() ? "" : fmt::format(" {}", escape_html(chart_.unit)),
                          x(step) - width / 2, kTop, width, kPlotHeight, x(step), y(value));
    }
    return body;
  }

  const Chart& chart_;
  const Points& points_;
  Axis x_, y_;
};

}  // namespace

std::string chart_svg(const Chart& chart) {
  // A loss that became NaN must not take the rest of the curve with it.
  Points finite;
  for (const auto& point : chart.points) {
    if (std::isfinite(point.second)) {
      finite.push_back(point);
    }
  }
  if (finite.empty()) {
    return R"(<p class="empty">no finite values</p>)";
  }
  return Plot(chart, finite).svg();
}

}  // namespace tessera::observe

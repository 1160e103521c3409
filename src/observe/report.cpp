// The report of a run. Each function returns a piece of HTML; whatever comes from outside is
// escaped where it is put in.
#include "tessera/observe/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>

#include "tessera/observe/axis.h"
#include "tessera/observe/page.h"
#include "tessera/observe/text.h"

namespace tessera::observe {
namespace {

// Curves are SVG, which needs no script and no file beside the report: axes first, then the curves.
// Coordinates are those of the viewBox; the page scales the whole. Colours and line widths are
// classes of report_style.h.

/// A curve over the steps of a run.
struct Chart {
  std::string title{};
  std::string unit{};                               ///< behind the title and in hover texts
  std::vector<std::pair<double, double>> points{};  ///< (step, value), rising steps
  bool smooth = true;                               ///< a running mean in front of many points
  bool from_zero = false;                           ///< the axis begins at 0
  bool may_be_logarithmic = false;  ///< if the values span more than a decade and a half
};

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

/// Mean over the points around each point, `reach` on each side.
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

/// Draws a chart. `points` are finite, at least one. Both arguments must outlive the plot.
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
    const double base = kTop + kPlotHeight;
    return grid_svg(y_, kLeft, kWidth - kRight, [this](double tick) { return y(tick); }) +
           marks_svg(x_, base, [this](double tick) { return x(tick); }) +
           fmt::format(R"(<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>)"
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

/// An SVG element: the curve, its running mean where it has many points, axes with labels, and a
/// hover text at each step (or group of steps). Values that are not finite are left out.
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

using Steps = std::vector<StepMetrics>;

/// The middle value, since the first steps are slower than the rest. `field`: a member, or a
/// function of a step.
template <class Field>
double median(const Steps& steps, Field field) {
  std::vector<double> values;
  for (const auto& step : steps) {
    values.push_back(static_cast<double>(std::invoke(field, step)));
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// There is at least one step. Traffic and memory are those of the last step.
std::string tiles(const Steps& steps) {
  const auto& last = steps.back();
  std::string html = html_tile(fmt::format("{:.4f}", last.loss), "loss, last step");
  html += html_tile(grouped(median(steps, &StepMetrics::tokens_per_s)), "tokens/s, median");
  html += html_tile(fmt::format("{:.4g} s", median(steps, &StepMetrics::step_time_s)),
                    "step time, median");
  html += html_tile(fmt::format("{:.4g}", median(steps, &StepMetrics::tflops)), "TFLOP/s per rank");
  if (last.mfu) {
    const auto mfu = [](const StepMetrics& step) { return step.mfu.value_or(0); };
    const auto causal = [](const StepMetrics& step) { return step.mfu_causal.value_or(0); };
    html += html_tile(fmt::format("{:.1f} %", median(steps, mfu)),
                      fmt::format("MFU, median (causal {:.1f} %)", median(steps, causal)));
  }
  html += html_tile(bytes_text(static_cast<double>(last.peak_memory_bytes)), "peak memory, rank 0");
  const auto traffic = comm::total(last.comm);
  html += html_tile(bytes_text(static_cast<double>(traffic.bytes)),
                    fmt::format("sent a step, {} collectives", grouped(double(traffic.calls))));
  if (traffic.link_bytes > 0) {
    html += html_tile(bytes_text(static_cast<double>(traffic.link_bytes)),
                      "of a step sent to other hosts, rank 0");
  }
  return "<div class=\"tiles\">\n" + html + "</div>\n";
}

template <class Field>
Chart chart_of(const Steps& steps, const char* title, const char* unit, Field field) {
  Chart chart{.title = title, .unit = unit};
  for (const auto& step : steps) {
    chart.points.emplace_back(static_cast<double>(step.step), std::invoke(field, step));
  }
  return chart;
}

/// `title` and `unit` are constants and need no escape.
std::string chart_card(const Chart& chart) {
  const std::string unit = chart.unit.empty() ? "" : "<span>" + chart.unit + "</span>";
  return fmt::format("<figure class=\"card chart\" style=\"margin:0\"><h3>{}{}</h3>{}</figure>\n",
                     chart.title, unit, chart_svg(chart));
}

/// Nothing for a run without evaluations.
std::string held_out_card(const Steps& steps) {
  Chart chart{.title = "Held-out loss", .unit = "nats per token", .smooth = false};
  for (const auto& step : steps) {
    if (step.eval_loss) {
      chart.points.emplace_back(static_cast<double>(step.step), *step.eval_loss);
    }
  }
  return chart.points.empty() ? "" : chart_card(chart);
}

std::string charts(const Steps& steps) {
  Chart loss = chart_of(steps, "Loss", "nats per token", &StepMetrics::loss);
  Chart norm = chart_of(steps, "Gradient norm", "before clipping", &StepMetrics::grad_norm);
  norm.may_be_logarithmic = true;
  Chart speed = chart_of(steps, "Throughput", "tokens/s", &StepMetrics::tokens_per_s);
  // A throughput that varies by 1 % should look flat.
  speed.from_zero = true;
  // The last step's peak is the largest: it chooses one unit, with round ticks, for the curve.
  const bool large = steps.back().peak_memory_bytes >= (std::int64_t{1} << 30);
  const double unit = large ? 1 << 30 : 1 << 20;
  Chart memory = chart_of(steps, "Peak memory of rank 0", large ? "GiB" : "MiB",
                          [unit](const StepMetrics& step) {
                            return static_cast<double>(step.peak_memory_bytes) / unit;
                          });
  memory.from_zero = true;
  // A peak only rises; its mean would say nothing.
  memory.smooth = false;
  return "<div class=\"charts\">\n" + chart_card(loss) + held_out_card(steps) + chart_card(norm) +
         chart_card(speed) + chart_card(memory) + "</div>\n";
}

/// "128 × 64".
std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  return sizes.empty() ? "scalar" : fmt::format("{}", fmt::join(sizes, " × "));
}

/// A row for each parameter; the table scrolls within its card.
std::string sharding(const std::vector<ShardingRow>& table) {
  std::string rows;
  for (const auto& row : table) {
    rows += fmt::format(
        "<tr><td class=\"name\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td>"
        "<td class=\"n\" title=\"{} bytes\">{}</td></tr>\n",
        escape_html(row.name), sizes_text(row.sizes), escape_html(row.placements),
        sizes_text(row.local_sizes), grouped(static_cast<double>(row.local_bytes)),
        bytes_text(static_cast<double>(row.local_bytes)));
  }
  return "<div class=\"card scroll\"><table><thead><tr><th>parameter</th><th class=\"n\">global "
         "size</th><th>placements</th><th class=\"n\">local size</th><th class=\"n\">on rank 0</th>"
         "</tr></thead><tbody>\n" +
         rows + "</tbody></table></div>\n";
}

/// Elements are counted in doubles, which are exact up to 2^53.
std::string sharding_note(const std::vector<ShardingRow>& table) {
  double elements = 0, bytes = 0;
  for (const auto& row : table) {
    elements += std::accumulate(row.sizes.begin(), row.sizes.end(), 1.0, std::multiplies<>());
    bytes += static_cast<double>(row.local_bytes);
  }
  return fmt::format("{} parameters in {} tensors, {} on rank 0", grouped(elements), table.size(),
                     bytes_text(bytes));
}

/// Time in steps, without what is between them.
std::string summary(const Steps& steps) {
  if (steps.empty()) {
    return "no steps were run";
  }
  double seconds = 0;
  for (const auto& step : steps) {
    seconds += step.step_time_s;
  }
  return fmt::format("{} steps in {}", grouped(static_cast<double>(steps.size())),
                     duration_text(seconds));
}

/// Sections without content are left out.
std::string body(const Report& report) {
  std::string html = fmt::format("<header><h1>{}</h1><p>{}</p></header>\n",
                                 escape_html(report.title), summary(report.steps));
  if (!report.steps.empty()) {
    const auto& last = report.steps.back();
    html += tiles(report.steps);
    html += html_section("Curves", charts(report.steps));
    html += html_section("Communication", traffic_table(last.comm),
                         fmt::format("of rank 0 in step {}; bytes that it puts in", last.step));
  }
  if (!report.sample.empty()) {
    html += html_section(
        "Sample", "<div class=\"card\"><pre>" + escape_html(report.sample) + "</pre></div>\n");
  }
  if (!report.configuration.empty()) {
    html += html_section("Configuration", html_list(report.configuration));
  }
  if (!report.sharding.empty()) {
    html += html_section("Sharding", sharding(report.sharding), sharding_note(report.sharding));
  }
  return html;
}

}  // namespace

void write_report(const Report& report, const std::filesystem::path& path) {
  write_page(report.title, body(report), path);
}

}  // namespace tessera::observe

// The report of a run. Each function returns a piece of HTML; whatever comes from outside is
// escaped where it is put in.
#include "tessera/observe/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "chart.h"
#include "tessera/observe/page.h"
#include "tessera/observe/text.h"

namespace tessera::observe {
namespace {

using Steps = std::vector<StepMetrics>;

/// Middle value of a field over the steps: the first ones are slower than the rest.
/// `field`: a member, or a function of a step.
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
  // In a unit that gives round ticks.
  // By the last step, whose peak is the largest: one unit for the whole curve.
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

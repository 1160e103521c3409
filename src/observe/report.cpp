#include "tessera/observe/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "chart.h"
#include "html.h"
#include "number_text.h"
#include "report_style.h"
#include "tessera/core/atomic_file.h"

namespace tessera::observe {
namespace {

using Steps = std::vector<StepMetrics>;

/// Middle value of a field over the steps: the first ones are slower than the rest.
template <class Field>
double median(const Steps& steps, Field field) {
  std::vector<double> values;
  for (const auto& step : steps) values.push_back(static_cast<double>(std::invoke(field, step)));
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string section(const std::string& heading, const std::string& body,
                    const std::string& note = "") {
  const std::string aside = note.empty() ? "" : fmt::format("<span>{}</span>", note);
  return fmt::format("<section><h2>{}{}</h2>\n{}</section>\n", heading, aside, body);
}

std::string tile(const std::string& value, const std::string& label) {
  return fmt::format("<div class=\"card tile\"><b>{}</b><span>{}</span></div>\n", value, label);
}

std::string tiles(const Steps& steps) {
  const auto& last = steps.back();
  std::string html = tile(fmt::format("{:.4f}", last.loss), "loss, last step");
  html += tile(grouped(median(steps, &StepMetrics::tokens_per_s)), "tokens/s, median");
  html +=
      tile(fmt::format("{:.4g} s", median(steps, &StepMetrics::step_time_s)), "step time, median");
  html += tile(fmt::format("{:.4g}", median(steps, &StepMetrics::tflops)), "TFLOP/s per rank");
  if (last.mfu) {
    const auto mfu = [](const StepMetrics& step) { return step.mfu.value_or(0); };
    const auto causal = [](const StepMetrics& step) { return step.mfu_causal.value_or(0); };
    html += tile(fmt::format("{:.1f} %", median(steps, mfu)),
                 fmt::format("MFU, median (causal {:.1f} %)", median(steps, causal)));
  }
  html += tile(bytes_text(static_cast<double>(last.peak_memory_bytes)), "peak memory, rank 0");
  const auto traffic = comm::total(last.comm);
  html += tile(bytes_text(static_cast<double>(traffic.bytes)),
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

std::string chart_card(const Chart& chart) {
  const std::string unit = chart.unit.empty() ? "" : "<span>" + chart.unit + "</span>";
  return fmt::format("<figure class=\"card chart\" style=\"margin:0\"><h3>{}{}</h3>{}</figure>\n",
                     chart.title, unit, chart_svg(chart));
}

std::string charts(const Steps& steps) {
  Chart loss = chart_of(steps, "Loss", "nats per token", &StepMetrics::loss);
  Chart norm = chart_of(steps, "Gradient norm", "before clipping", &StepMetrics::grad_norm);
  norm.may_be_logarithmic = true;
  Chart speed = chart_of(steps, "Throughput", "tokens/s", &StepMetrics::tokens_per_s);
  speed.from_zero = true;
  // In a unit that gives round ticks.
  const bool large = steps.back().peak_memory_bytes >= (std::int64_t{1} << 30);
  const double unit = large ? 1 << 30 : 1 << 20;
  Chart memory = chart_of(steps, "Peak memory of rank 0", large ? "GiB" : "MiB",
                          [unit](const StepMetrics& step) {
                            return static_cast<double>(step.peak_memory_bytes) / unit;
                          });
  memory.from_zero = true;
  memory.smooth = false;
  return "<div class=\"charts\">\n" + chart_card(loss) + chart_card(norm) + chart_card(speed) +
         chart_card(memory) + "</div>\n";
}

std::string communication(const StepMetrics& step) {
  const auto sum = comm::total(step.comm);
  if (sum.calls == 0) return "<div class=\"card\"><p class=\"empty\">None: one rank.</p></div>\n";
  std::string rows;
  for (const auto& [key, traffic] : step.comm) {
    const double share =
        sum.bytes == 0 ? 0
                       : 100 * static_cast<double>(traffic.bytes) / static_cast<double>(sum.bytes);
    rows += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\" "
        "title=\"{} bytes\">{}</td><td class=\"wide\"><span class=\"share\" "
        "style=\"width:{:.1f}%\" "
        "title=\"{:.1f} %\"></span></td></tr>\n",
        escape_html(key.first), escape_html(key.second), traffic.calls,
        bytes_text(static_cast<double>(traffic.bytes) / static_cast<double>(traffic.calls)),
        grouped(static_cast<double>(traffic.bytes)), bytes_text(static_cast<double>(traffic.bytes)),
        share, share);
  }
  rows += fmt::format(
      "<tr class=\"total\"><td>total</td><td></td><td class=\"n\">{}</td><td></td><td class=\"n\" "
      "title=\"{} bytes\">{}</td><td></td></tr>\n",
      sum.calls, grouped(static_cast<double>(sum.bytes)),
      bytes_text(static_cast<double>(sum.bytes)));
  return "<div class=\"card scroll\"><table><thead><tr><th>mesh dimension</th><th>collective</th>"
         "<th class=\"n\">calls</th><th class=\"n\">per call</th><th class=\"n\">per step</th>"
         "<th>share of bytes</th></tr></thead><tbody>\n" +
         rows + "</tbody></table></div>\n";
}

std::string configuration(const Report& report) {
  std::string items;
  for (const auto& [name, value] : report.configuration) {
    items +=
        fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escape_html(name), escape_html(value));
  }
  return "<dl class=\"card\">\n" + items + "</dl>\n";
}

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  return sizes.empty() ? "scalar" : fmt::format("{}", fmt::join(sizes, " × "));
}

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

std::string sharding_note(const std::vector<ShardingRow>& table) {
  double elements = 0, bytes = 0;
  for (const auto& row : table) {
    elements += std::accumulate(row.sizes.begin(), row.sizes.end(), 1.0, std::multiplies<>());
    bytes += static_cast<double>(row.local_bytes);
  }
  return fmt::format("{} parameters in {} tensors, {} on rank 0", grouped(elements), table.size(),
                     bytes_text(bytes));
}

std::string summary(const Steps& steps) {
  if (steps.empty()) return "no steps were run";
  double seconds = 0;
  for (const auto& step : steps) seconds += step.step_time_s;
  return fmt::format("{} steps in {}", grouped(static_cast<double>(steps.size())),
                     duration_text(seconds));
}

std::string body(const Report& report) {
  std::string html = fmt::format("<header><h1>{}</h1><p>{}</p></header>\n",
                                 escape_html(report.title), summary(report.steps));
  if (!report.steps.empty()) {
    const auto& last = report.steps.back();
    html += tiles(report.steps);
    html += section("Curves", charts(report.steps));
    html += section("Communication", communication(last),
                    fmt::format("of rank 0 in step {}; bytes that it puts in", last.step));
  }
  if (!report.sample.empty()) {
    html += section("Sample",
                    "<div class=\"card\"><pre>" + escape_html(report.sample) + "</pre></div>\n");
  }
  if (!report.configuration.empty()) html += section("Configuration", configuration(report));
  if (!report.sharding.empty()) {
    html += section("Sharding", sharding(report.sharding), sharding_note(report.sharding));
  }
  return html;
}

}  // namespace

void write_report(const Report& report, const std::filesystem::path& path) {
  // A full disk leaves an older report as it was.
  write_file(path,
             fmt::format("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                         "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                         "<title>{}</title>\n<style>{}</style></head>\n<body><main>\n{}"
                         "<footer>Written by Tessera.</footer>\n</main></body></html>\n",
                         escape_html(report.title), kReportStyle, body(report)));
}

}  // namespace tessera::observe

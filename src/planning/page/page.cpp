#include "tessera/planning/page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "page/page_style.h"
#include "page/pictures.h"
#include "report/size_text.h"
#include "tessera/observe/page.h"
#include "tessera/observe/text.h"
#include "tessera/planning/report.h"

namespace tessera::planning {
using observe::escape_html;
using observe::html_section;
using observe::html_tile;

namespace {

/// Layers that the second time line shows.
constexpr double kLayersShown = 3;

std::string card(const std::string& html) {
  return "<div class=\"card picture\">" + html + "</div>\n";
}

std::string title_of(const RunPlan& plan, const PageOptions& options) {
  const std::optional<Machine>& machine = plan.options.machine;
  return fmt::format("Plan of {}: {} ranks{}", options.name, plan.mesh.numel(),
                     machine ? " of " + machine->name : "");
}

std::string header(const RunPlan& plan, const PageOptions& options) {
  std::string advices;
  for (const std::string& line : plan.fits() ? std::vector<std::string>{} : advice(plan)) {
    advices += "<li>" + escape_html(line) + "</li>";
  }
  return fmt::format(
      "<header><h1>{}</h1><p>{}</p>"
      "<p class=\"verdict{}\">{}</p>{}</header>\n",
      escape_html(title_of(plan, options)), escape_html(options.settings),
      plan.fits() ? "" : " over", escape_html(verdict(plan)),
      advices.empty() ? "" : "<ul class=\"advice\">" + advices + "</ul>");
}

std::string tiles_of(const RunPlan& plan) {
  const RankPlan& rank = plan.largest();
  std::string html =
      html_tile(size_text(rank.memory.peak_bytes), "peak memory, largest kind of rank");
  if (rank.time) {
    double exposed = 0;
    for (const auto& [group, seconds] : rank.time->exposed) {
      exposed += seconds;
    }
    html += html_tile(fmt::format("{:.4g} s", rank.time->total), "step time, estimated");
    if (rank.metrics.mfu) {
      html += html_tile(fmt::format("{:.1f} %", *rank.metrics.mfu), "MFU, estimated");
      html += html_tile(observe::grouped(rank.metrics.tokens_per_s), "tokens/s, estimated");
    }
    html += html_tile(fmt::format("{:.1f} %", 100 * exposed / rank.time->total),
                      "of the step waits for collectives");
  }
  const comm::Traffic sent = comm::total(rank.metrics.comm);
  html += html_tile(size_text(sent.bytes), fmt::format("sent a step, {} collectives",
                                                       observe::grouped(double(sent.calls))));
  return "<div class=\"tiles\">\n" + html + "</div>\n";
}

std::string memory_section(const RunPlan& plan) {
  std::string html = purpose_legend();
  for (const RankPlan& rank : plan.ranks) {
    const std::string heading =
        plan.ranks.size() == 1
            ? ""
            : fmt::format("<h3>rank {}<span>one of {} alike</span></h3>", rank.kind.first,
                          observe::grouped(double(rank.kind.count)));
    html += card(heading + memory_picture(plan, rank));
  }
  return html_section("Memory over the step", html,
                      "the most while each unit is under way, by what it is for");
}

/// The whole step, and some layers in the middle of backward, where most is sent.
std::string time_section(const RunPlan& plan, std::int64_t layers) {
  const StepTime& time = *plan.largest().time;
  std::vector<Span> backward;
  std::ranges::copy_if(time.spans, std::back_inserter(backward),
                       [](const Span& span) { return span.what == "backward"; });
  std::string html = timeline_legend() + card(timeline_picture(time, 0, time.total));
  if (!backward.empty()) {
    const double begin = backward.front().begin, end = backward.back().end;
    const double shown = (end - begin) * std::min(kLayersShown / static_cast<double>(layers), 1.0);
    const double middle = (begin + end) / 2;
    html += card("<h3>A few layers of backward</h3>" +
                 timeline_picture(time, middle - shown / 2, middle + shown / 2));
  }
  return html_section("Time line", html,
                      fmt::format("of rank {}, estimated", plan.largest().kind.first));
}

std::string search_section(const Search& search) {
  return html_section("Layouts", card(search_picture(search)) + search_table(search),
                      "memory over time of those that were estimated; the line is the frontier");
}

std::string body_of(const RunPlan& plan, const std::optional<Search>& search,
                    const PageOptions& options) {
  std::string html = header(plan, options) + tiles_of(plan);
  if (search) {
    html += search_section(*search);
  }
  html += memory_section(plan);
  html += html_section(
      "Communication", observe::traffic_table(plan.largest().metrics.comm),
      fmt::format("of rank {} in a step; bytes that it puts in", plan.largest().kind.first));
  if (plan.options.machine) {
    html += time_section(plan, options.layers);
  }
  return html + html_section("Configuration", observe::html_list(options.configuration));
}

}  // namespace

void write_plan_page(const RunPlan& plan, const std::optional<Search>& search,
                     const PageOptions& options, const std::filesystem::path& file) {
  observe::write_page(title_of(plan, options), body_of(plan, search, options), file, kPageStyle);
}

}  // namespace tessera::planning

// Each layout as a point: its time to the right, its memory upwards.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "page/pictures.h"
#include "report/size_text.h"
#include "tessera/observe/axis.h"
#include "tessera/observe/text.h"

namespace tessera::planning {

using observe::Axis;
using observe::escape_html;
using observe::grouped;
using observe::linear_axis;

namespace {

/// In units of the viewBox.
constexpr double kAcross = 1120, kDown = 360, kFromLeft = 62, kFromRight = 20, kFromTop = 26,
                 kFromBottom = 40;
constexpr double kBytesOfGib = 1 << 30;
/// As a share of the room: what takes more is left out.
constexpr double kMostShown = 1.3;
/// A label nearer than this to the last one would cover it.
constexpr double kLabelHeight = 15, kLabelWidth = 190;

class SearchPicture {
 public:
  explicit SearchPicture(const Search& search)
      : room_(static_cast<double>(search.space.machine.room())),
        machine_(search.space.machine.name) {
    double most_time = 0, least_bytes = room_, most_bytes = room_;
    double least_time = search.best().estimate.metrics.step_time_s;
    for (const FoundLayout& found : search.found) {
      const auto bytes = static_cast<double>(found.estimate.peak_bytes);
      if (bytes > kMostShown * room_) {
        continue;
      }
      shown_.push_back(&found);
      least_time = std::min(least_time, found.estimate.metrics.step_time_s);
      most_time = std::max(most_time, found.estimate.metrics.step_time_s);
      least_bytes = std::min(least_bytes, bytes);
      most_bytes = std::max(most_bytes, bytes);
    }
    time_ = linear_axis(least_time * 0.97, std::max(most_time, least_time) * 1.03, 8);
    memory_ = linear_axis(least_bytes * 0.9 / kBytesOfGib, most_bytes * 1.02 / kBytesOfGib, 5);
  }

  std::string svg() const {
    return fmt::format(
               R"(<svg viewBox="0 0 {} {}" role="img" aria-label="memory over time of layouts">)",
               kAcross, kDown) +
           axes() + limit() + front() + points() + labels() + "</svg>\n";
  }

 private:
  double x(double seconds) const {
    return kFromLeft + time_.position(seconds) * (kAcross - kFromLeft - kFromRight);
  }
  double y(double bytes) const {
    return kFromTop +
           (1 - memory_.position(bytes / kBytesOfGib)) * (kDown - kFromTop - kFromBottom);
  }
  double x(const FoundLayout& found) const { return x(found.estimate.metrics.step_time_s); }
  double y(const FoundLayout& found) const {
    return y(static_cast<double>(found.estimate.peak_bytes));
  }

  std::string axes() const {
    const double base = kDown - kFromBottom;
    return observe::grid_svg(memory_, kFromLeft, kAcross - kFromRight,
                             [this](double tick) { return y(tick * kBytesOfGib); }) +
           observe::marks_svg(time_, base, [this](double tick) { return x(tick); }) +
           fmt::format(R"(<text x="{}" y="14" text-anchor="end">GiB</text>)"
                       R"(<text x="{}" y="{}" text-anchor="end">seconds a step</text>)",
                       kFromLeft - 8, kAcross - kFromRight, base + 34);
  }

  std::string limit() const {
    return fmt::format(
        R"(<rect class="band" x="{0}" y="{1}" width="{2}" height="{3:.1f}"/>)"
        R"(<path class="limit" d="M{0} {4:.1f}H{5}"/>)"
        R"(<text class="limit-text" x="{6}" y="{7:.1f}" text-anchor="end">{8} of a {9}</text>)",
        kFromLeft, kFromTop, kAcross - kFromLeft - kFromRight, std::max(y(room_) - kFromTop, 0.0),
        y(room_), kAcross - kFromRight, kAcross - kFromRight - 4, y(room_) - 5,
        size_text(static_cast<std::int64_t>(room_)), escape_html(machine_));
  }

  /// Less memory only for more time: steps.
  std::string front() const {
    std::string path;
    for (const FoundLayout* found : shown_) {
      if (found->frontier) {
        path += path.empty() ? fmt::format("M{:.1f} {:.1f}", x(*found), y(*found))
                             : fmt::format("H{:.1f}V{:.1f}", x(*found), y(*found));
      }
    }
    return fmt::format(R"(<path class="front" d="{}"/>)", path);
  }

  std::string points() const {
    std::string body;
    for (const FoundLayout* found : shown_) {
      body += fmt::format(
          R"(<circle class="point{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {}, {:.3f} s)"
          R"(</title></circle>)",
          !found->fits      ? " over"
          : found->frontier ? " best"
                            : "",
          x(*found), y(*found), found->frontier ? 5 : 4, name_of(found->layout),
          size_text(found->estimate.peak_bytes), found->estimate.metrics.step_time_s);
    }
    return body;
  }

  /// The labels of the frontier, where there is room.
  std::string labels() const {
    std::string body;
    double last_x = -kLabelWidth, last_y = -kLabelHeight;
    for (const FoundLayout* found : shown_) {
      const bool covers = x(*found) - last_x < kLabelWidth && y(*found) - last_y < kLabelHeight;
      if (!found->frontier || covers) {
        continue;
      }
      last_x = x(*found);
      last_y = y(*found);
      const bool left = last_x > kAcross - kLabelWidth - kFromRight;
      body += fmt::format(R"(<text class="named" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>)",
                          last_x + (left ? -9 : 9), last_y + (left ? 16 : -6),
                          left ? "end" : "start", name_of(found->layout));
    }
    return body;
  }

  double room_;
  std::string machine_;
  std::vector<const FoundLayout*> shown_;
  Axis time_, memory_;
};

/// Only where some layout has it.
std::string number_cell(bool shown, std::int64_t value) {
  return shown ? fmt::format("<td class=\"n\">{}</td>", value) : "";
}

std::string table_row(const FoundLayout& found, bool has_cp, bool has_accumulation) {
  const observe::StepMetrics& metrics = found.estimate.metrics;
  const TrainingLayout& layout = found.layout;
  return fmt::format(
      "<tr{}><td class=\"n\">{}</td><td class=\"n\">{}</td>{}<td>{}</td><td class=\"n\">{}</td>{}"
      "<td class=\"n\" title=\"{}\">{}</td><td class=\"n\">{:.3f} s</td>"
      "<td class=\"n\">{:.3f} s</td><td class=\"n\">{:.1f} %</td><td class=\"n\">{}</td>"
      "<td>{}</td></tr>\n",
      found.frontier ? " class=\"front-row\"" : "", layout.dp, layout.tp,
      number_cell(has_cp, layout.cp), layout.ac, layout.zero,
      number_cell(has_accumulation, layout.accumulate), escape_html(found.estimate.peak_moment),
      size_text(found.estimate.peak_bytes), metrics.step_time_s, found.estimate.exposed_s,
      metrics.mfu.value_or(0), grouped(metrics.tokens_per_s),
      !found.fits      ? "too large"
      : found.frontier ? "frontier"
                       : "");
}

}  // namespace

std::string search_picture(const Search& search) {
  return SearchPicture(search).svg();
}

std::string search_table(const Search& search) {
  std::string rows;
  for (const FoundLayout& found : search.found) {
    rows += table_row(found, search.has_cp(), search.has_accumulation());
  }
  return "<div class=\"card scroll\"><table><thead><tr><th class=\"n\">dp</th><th "
         "class=\"n\">tp</th>" +
         std::string(search.has_cp() ? "<th class=\"n\">cp</th>" : "") +
         "<th>ac</th><th class=\"n\">ZeRO</th>" +
         std::string(search.has_accumulation() ? "<th class=\"n\">micro-batches</th>" : "") +
         "<th class=\"n\">peak</th><th "
         "class=\"n\">step</th><th class=\"n\">exposed</th><th class=\"n\">MFU</th><th "
         "class=\"n\">tokens/s</th><th></th></tr></thead><tbody>\n" +
         rows + "</tbody></table></div>\n";
}

}  // namespace tessera::planning

// A row for the operators, one for what they wait for, and one for the collectives of each mesh
// dimension. What is nearer than can be seen is drawn as one.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "page/pictures.h"
#include "tessera/observe/axis.h"
#include "tessera/observe/text.h"

namespace tessera::planning {

using observe::escape_html;

namespace {

/// In units of the viewBox.
constexpr double kLineWidth = 1120, kNames = 86, kPast = 12, kRow = 26, kBar = 18, kAxisRoom = 24;
/// Less than this is not seen.
constexpr double kNear = 0.35;

/// Classes of phases, by name; collectives have that of their kind.
constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kColours{
    {{"forward", "p0"},
     {"backward", "p1"},
     {"update", "p5"},
     {"all_gather", "p3"},
     {"reduce_scatter", "p2"},
     {"all_reduce", "p4"},
     {"waiting", "bad"}}};

std::string_view colour_of(const Span& span) {
  const std::string& name = span.row == "waiting" ? span.row : span.what;
  const auto* const found =
      std::ranges::find(kColours, name, [](const auto& entry) { return entry.first; });
  return found == kColours.end() ? "p6" : found->second;
}

/// Rows in the order of the picture.
std::vector<std::string> rows_of(const StepTime& time) {
  std::vector<std::string> rows{"operators", "waiting"};
  for (const auto& [group, seconds] : time.communication) {
    rows.push_back(group);
  }
  return rows;
}

/// Spans that are drawn as one.
struct Drawn {
  Span span;
  int count = 1;
};

class TimelinePicture {
 public:
  TimelinePicture(const StepTime& time, double begin, double end)
      : time_(time),
        begin_(begin),
        end_(end),
        unit_(end - begin < 1 ? 1e-3 : 1),
        axis_(observe::linear_axis(begin / unit_, end / unit_, 8)) {}

  std::string svg() const {
    const std::vector<std::string> rows = rows_of(time_);
    const double height = kRow * static_cast<double>(rows.size());
    std::string body = ticks(height);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double top = kRow * static_cast<double>(i);
      body += fmt::format(R"(<text x="{}" y="{:.1f}" text-anchor="end">{}</text>)", kNames - 10,
                          top + kBar - 1, escape_html(rows[i]));
      for (const Drawn& drawn : drawn_of(rows[i])) {
        body += bar(drawn, top + (kRow - kBar) / 2);
      }
    }
    return fmt::format(
        R"(<svg viewBox="0 0 {} {}" role="img" aria-label="time line"><g class="spans">{}</g></svg>)"
        "\n",
        kLineWidth, height + kAxisRoom, body);
  }

 private:
  double x(double seconds) const {
    const double share = (seconds - begin_) / (end_ - begin_);
    return kNames + std::clamp(share, 0.0, 1.0) * (kLineWidth - kNames - kPast);
  }

  std::vector<Drawn> drawn_of(const std::string& row) const {
    std::vector<Drawn> all;
    for (const Span& span : time_.spans) {
      if (span.row != row || span.end <= begin_ || span.begin >= end_) {
        continue;
      }
      if (!all.empty() && all.back().span.what == span.what &&
          x(span.begin) - x(all.back().span.end) < kNear) {
        all.back().span.end = std::max(all.back().span.end, span.end);
        ++all.back().count;
      } else {
        all.push_back({span});
      }
    }
    return all;
  }

  std::string bar(const Drawn& drawn, double top) const {
    const Span& span = drawn.span;
    const std::string what = (span.row == "waiting" ? "waits for " : "") + span.what;
    return fmt::format(
        R"(<rect class="{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}{}, )"
        R"({:.3f} to {:.3f} ms</title></rect>)",
        colour_of(span), x(span.begin), top, std::max(x(span.end) - x(span.begin), kNear), kBar,
        escape_html(what), drawn.count > 1 ? fmt::format(" ({} times)", drawn.count) : "",
        1e3 * span.begin, 1e3 * span.end);
  }

  std::string ticks(double height) const {
    std::string body;
    for (const double tick : axis_.ticks) {
      if (tick * unit_ < begin_ || tick * unit_ > end_) {
        continue;
      }
      body += fmt::format(R"(<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"/>)"
                          R"(<text x="{0:.1f}" y="{2}" text-anchor="middle">{3}</text>)",
                          x(tick * unit_), height, height + 16, axis_.label(tick));
    }
    // Beside the label of a tick at the very left.
    return body + fmt::format(R"(<text x="{}" y="{}" text-anchor="end">{}</text>)", kNames - 30,
                              height + 16, unit_ < 1 ? "ms" : "s");
  }

  const StepTime& time_;
  double begin_, end_, unit_;
  observe::Axis axis_;
};

}  // namespace

std::string timeline_picture(const StepTime& time, double begin, double end) {
  return TimelinePicture(time, begin, end).svg();
}

std::string timeline_legend() {
  std::string items;
  for (const auto& [name, colour] : kColours) {
    items += fmt::format("<span><i class=\"{}\"></i>{}</span>", colour, name);
  }
  return "<div class=\"legend\">" + items + "</div>\n";
}

}  // namespace tessera::planning

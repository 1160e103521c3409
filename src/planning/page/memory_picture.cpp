// Bars side by side, one a moment: widths say nothing, heights are bytes.

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "page/pictures.h"
#include "report/size_text.h"
#include "tessera/observe/axis.h"
#include "tessera/observe/text.h"

namespace tessera::planning {

using observe::Axis;
using observe::escape_html;
using observe::kMemoryKinds;
using observe::MemoryKind;
using observe::MomentMemory;

namespace {

/// The drawing's sizes, in units of its viewBox.
constexpr double kWide = 1120, kHigh = 292, kLeftMargin = 62, kRightMargin = 12, kTopMargin = 30,
                 kBottomMargin = 26;
constexpr double kInner = kWide - kLeftMargin - kRightMargin;
constexpr double kGibibyte = 1 << 30, kMebibyte = 1 << 20;

/// "the backward" of "the backward of unit 'x'".
std::string_view phase_of(std::string_view moment) {
  return moment.substr(0, moment.find(" of "));
}

class MemoryPicture {
 public:
  MemoryPicture(const RunPlan& plan, const RankPlan& rank)
      : plan_(plan),
        moments_(rank.memory.moments),
        peak_(*std::ranges::max_element(moments_, {}, &MomentMemory::bytes)) {
    const auto highest = static_cast<double>(peak_.bytes);
    unit_ = highest >= kGibibyte ? kGibibyte : kMebibyte;
    if (plan.options.machine) {
      room_ = static_cast<double>(plan.options.machine->room());
    }
    // A limit far above would leave the bars no height.
    shows_room_ = plan.options.machine && room_ < 2 * highest;
    axis_ = observe::linear_axis(0, std::max(highest, shows_room_ ? room_ : 0) / unit_, 5);
  }

  std::string svg() const {
    return fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="memory over the step">)",
                       kWide, kHigh) +
           grid() + "<g class=\"bars\">" + bars() + "</g>" + limit() + name_of_peak() + phases() +
           "</svg>\n";
  }

 private:
  double width() const { return kInner / static_cast<double>(moments_.size()); }
  double x(std::size_t moment) const { return kLeftMargin + width() * static_cast<double>(moment); }
  double y(double bytes) const {
    return kTopMargin + (1 - axis_.position(bytes / unit_)) * (kHigh - kTopMargin - kBottomMargin);
  }

  std::string grid() const {
    return observe::grid_svg(axis_, kLeftMargin, kWide - kRightMargin,
                             [this](double tick) { return y(tick * unit_); }) +
           fmt::format(R"(<text x="{}" y="14" text-anchor="end">{}</text>)", kLeftMargin - 8,
                       unit_ == kGibibyte ? "GiB" : "MiB");
  }

  std::string bars() const {
    std::string body;
    const double wide = std::max(width() - (width() > 4 ? 1 : 0), 0.5);
    for (std::size_t i = 0; i < moments_.size(); ++i) {
      body += fmt::format("<g><title>{}: {}</title>", escape_html(moments_[i].name),
                          size_text(moments_[i].bytes));
      double sum = 0;
      for (std::size_t kind = 0; kind < kMemoryKinds; ++kind) {
        if (plan_.on_host(static_cast<MemoryKind>(kind)) || moments_[i].live[kind] == 0) {
          continue;
        }
        const auto bytes = static_cast<double>(moments_[i].live[kind]);
        body += fmt::format(
            R"(<rect class="p{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{:.2f}"/>)", kind,
            x(i), y(sum + bytes), wide, y(sum) - y(sum + bytes));
        sum += bytes;
      }
      body += "</g>";
    }
    return body;
  }

  std::string limit() const {
    return !shows_room_
               ? ""
               : fmt::format(R"(<path class="limit" d="M{} {:.1f}H{}"/>)"
                             R"(<text class="limit-text" x="{}" y="{:.1f}" )"
                             R"(text-anchor="end">{} of a {}</text>)",
                             kLeftMargin, y(room_), kWide - kRightMargin, kWide - kRightMargin - 4,
                             y(room_) - 5, size_text(plan_.options.machine->room()),
                             escape_html(plan_.options.machine->name));
  }

  /// Above the bar, towards the middle of the picture.
  std::string name_of_peak() const {
    const auto index = static_cast<std::size_t>(&peak_ - moments_.data());
    const double at = x(index) + width() / 2;
    const bool left = at > kWide * 0.6;
    const double top = y(static_cast<double>(peak_.bytes));
    return fmt::format(
        R"(<path class="mark" d="M{0:.1f} {1:.1f}v-7"/>)"
        R"(<text class="named" x="{2:.1f}" y="{3:.1f}" text-anchor="{4}">{5} in {6}</text>)",
        at, top - 1, at + (left ? -6 : 6), top - 5, left ? "end" : "start", size_text(peak_.bytes),
        escape_html(peak_.name));
  }

  /// Below the bars, where each phase is.
  std::string phases() const {
    std::string body;
    for (std::size_t first = 0; first < moments_.size();) {
      const std::string_view phase = phase_of(moments_[first].name);
      std::size_t end = first;
      while (end < moments_.size() && phase_of(moments_[end].name) == phase) {
        ++end;
      }
      const double base = kHigh - kBottomMargin;
      body += fmt::format(R"(<path class="axis" fill="none" d="M{:.1f} {}v5H{:.1f}v-5"/>)",
                          x(first) + 1, base + 2, x(end) - 1);
      if (x(end) - x(first) > 44) {
        body += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>)",
                            (x(first) + x(end)) / 2, base + 20, phase.substr(4));
      }
      first = end;
    }
    return body;
  }

  const RunPlan& plan_;
  const std::vector<MomentMemory>& moments_;
  const MomentMemory& peak_;
  double unit_ = kGibibyte;
  double room_ = 0;
  bool shows_room_ = false;
  Axis axis_;
};

}  // namespace

std::string memory_picture(const RunPlan& plan, const RankPlan& rank) {
  return MemoryPicture(plan, rank).svg();
}

std::string purpose_legend() {
  std::string items;
  for (std::size_t i = 0; i < kMemoryKinds; ++i) {
    items += fmt::format("<span><i class=\"p{}\"></i>{}</span>", i,
                         to_string(static_cast<MemoryKind>(i)));
  }
  return "<div class=\"legend\">" + items + "</div>\n";
}

}  // namespace tessera::planning

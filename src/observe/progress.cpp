// A progress line at the bottom of a terminal, redrawn in place. Prints nothing if the stream is a
// file. Formatting does not depend on the locale.
#include "tessera/observe/detail/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera::observe {
namespace {

/// The minimum time between two redraws, because a terminal is slower than the steps of a small
/// model.
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

/// The width of a terminal in characters; 80 if the terminal does not report its width. Queried for
/// each redraw, because a window may be resized.
std::size_t terminal_width(std::FILE* stream) {
  winsize size{};
  const bool known = ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

/// A progress bar of 20 cells with an arrow head; the full bar has no head.
std::string bar(std::int64_t step, std::int64_t steps) {
  constexpr std::int64_t kCells = 20;
  const auto full = static_cast<std::size_t>(kCells * step / steps);
  std::string cells(full, '=');
  if (full < kCells) {
    cells += '>';
  }
  cells.resize(kCells, ' ');
  return cells;
}

}  // namespace

/// The text is ASCII only, so that each byte is one column and the text can be cut anywhere.
std::string progress_text(std::int64_t step, std::int64_t steps, double loss, double tokens_per_s,
                          double seconds_left, std::size_t width) {
  std::string text =
      fmt::format("step {}/{} [{}] {:3}%  loss {:.4f}  {} tokens/s  ETA {}", step, steps,
                  bar(step, steps), 100 * step / steps, loss, grouped(tokens_per_s),
                  seconds_left < 0 ? "--" : duration_text(seconds_left));
  if (text.size() > width) {
    text.resize(width);
  }
  return text;
}

Progress::Progress(std::int64_t steps, std::FILE* stream, std::FILE* log)
    : steps_(std::max<std::int64_t>(steps, 1)),
      stream_(stream),
      log_(log),
      terminal_(isatty(fileno(stream)) == 1) {}

Progress::~Progress() {
  clear();
}

void Progress::update(std::int64_t step, double loss, double tokens_per_s) {
  if (!terminal_) {
    return;
  }
  const auto now = Clock::now();
  // Speed is measured from this run's first step on; the first step is slow and is excluded from
  // the mean.
  if (first_step_ == 0) {
    first_step_ = step;
    first_time_ = now;
  }
  // The progress line disappears after the last step.
  if (step >= steps_) {
    return clear();
  }
  if (drawn_ && now - last_drawn_ < kRedrawInterval) {
    return;
  }
  const auto measured = step - first_step_;
  const double elapsed = std::chrono::duration<double>(now - first_time_).count();
  const double left =
      measured == 0 ? -1
                    : elapsed / static_cast<double>(measured) * static_cast<double>(steps_ - step);
  // One column stays free, because a cursor after the last column would wrap.
  const auto text =
      progress_text(step, steps_, loss, tokens_per_s, left, terminal_width(stream_) - 1);
  // Returns to the start of the terminal line and clears it.
  std::fprintf(stream_, "\r\x1b[K%s", text.c_str());
  std::fflush(stream_);
  drawn_ = true;
  last_drawn_ = now;
}

/// Clears the progress line and prints `text`; the next update() draws the progress line again.
void Progress::line(const std::string& text) {
  clear();
  std::fprintf(log_, "%s\n", text.c_str());
  std::fflush(log_);
}

/// Clears the progress line if it is drawn.
void Progress::clear() {
  if (!drawn_) {
    return;
  }
  std::fprintf(stream_, "\r\x1b[K");
  std::fflush(stream_);
  drawn_ = false;
}

/// Groups the digits of a number from the decimal point to the left.
std::string grouped(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  // "inf" and "nan" have no digit groups.
  if (!std::isfinite(value)) {
    return text;
  }
  // Digit groups begin after the sign.
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  std::size_t position = text.find('.');
  if (position == std::string::npos) {
    position = text.size();
  }
  while (position > first + 3) {
    position -= 3;
    text.insert(position, 1, ',');
  }
  return text;
}

/// A size is shown with about three significant digits, in bytes without decimals.
std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; std::fabs(bytes) >= 1024 && unit + 1 < kUnits.size(); ++unit) {
    bytes /= 1024;
  }
  const int decimals = unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", bytes, decimals, kUnits[unit]);
}

/// A duration is shown in at most two units.
std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) {
    return fmt::format("{}s", whole);
  }
  if (whole < 3600) {
    return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  }
  if (whole < 86400) {
    return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  }
  return fmt::format("{}d{:02}h", whole / 86400, whole / 3600 % 24);
}

}  // namespace tessera::observe

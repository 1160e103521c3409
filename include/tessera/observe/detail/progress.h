#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A number with thousands separators, independent of the locale: "1,234,567.89".
std::string grouped(double value, int decimals = 0);
/// A size in bytes for people: "3.4 GiB", "512 B".
std::string bytes_text(double bytes);
/// A duration for people: "42s", "3m20s", "2h05m", "1d04h".
std::string duration_text(double seconds);

/// A progress line at the bottom of a terminal: the finished steps of a run and its estimated end.
/// Draws nothing if the stream is not a terminal. Print log lines with line(), so that they do not
/// mix with the progress line. Not thread safe.
class Progress {
 public:
  /// `stream`: the terminal on which the progress line is drawn. `log`: the stream to which line()
  /// writes.
  explicit Progress(std::int64_t steps, std::FILE* stream = stderr, std::FILE* log = stdout);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Reports that `step` steps are done. After the last step the progress line disappears.
  void update(std::int64_t step, double loss, double tokens_per_s);
  /// Prints a log line above the progress line.
  void line(const std::string& text);

 private:
  using Clock = std::chrono::steady_clock;

  void clear();

  std::int64_t steps_;
  std::FILE* stream_;
  std::FILE* log_;
  bool terminal_;
  bool drawn_ = false;
  std::int64_t first_step_ = 0;  ///< the first update; the speed is measured from it
  Clock::time_point first_time_;
  Clock::time_point last_drawn_;
};

/// "step 120/2000 [===>   ] 6% loss 2.3457 12,345 tokens/s ETA 3m20s", cut to `width` characters. A
/// negative `seconds_left` means unknown.
std::string progress_text(std::int64_t step, std::int64_t steps, double loss, double tokens_per_s,
                          double seconds_left, std::size_t width);

}  // namespace tessera::observe
TESSERA_API_END

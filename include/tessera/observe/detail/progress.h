#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// "1,234,567.89": thousands are separated, whatever the locale.
std::string grouped(double value, int decimals = 0);
/// "3.4 GiB", "512 B".
std::string bytes_text(double bytes);
/// "42s", "3m20s", "2h05m", "1d04h".
std::string duration_text(double seconds);

/// A line at the bottom of a terminal that says how far a run is and when it will end. Silent if
/// the stream is no terminal. Log lines go through line(), which keeps the two apart. For one
/// thread.
class Progress {
 public:
  /// Draws on `stream`; line() writes to `log`.
  explicit Progress(std::int64_t steps, std::FILE* stream = stderr, std::FILE* log = stdout);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Says that `step` steps are done. After the last one the line disappears.
  void update(std::int64_t step, double loss, double tokens_per_s);
  /// Prints a line of the log above the progress line.
  void line(const std::string& text);

 private:
  using Clock = std::chrono::steady_clock;

  void clear();

  std::int64_t steps_;
  std::FILE* stream_;
  std::FILE* log_;
  bool terminal_;
  bool drawn_ = false;
  std::int64_t first_step_ = 0;  ///< the first update, from which the speed is measured
  Clock::time_point first_time_;
  Clock::time_point last_drawn_;
};

/// "step 120/2000 [===>      ]  6%  loss 2.3457  12,345 tokens/s  ETA 3m20s", cut to `width`.
/// `seconds_left` < 0: not known yet.
std::string progress_text(std::int64_t step, std::int64_t steps, double loss, double tokens_per_s,
                          double seconds_left, std::size_t width);

}  // namespace tessera::observe
TESSERA_API_END

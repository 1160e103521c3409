// The way of a rank's output to the launcher's: a LineRelay reads the rank's pipe and cuts it into
// lines, a LineMerger joins equal ones of several ranks, an OutputSink writes them. None blocks;
// the Supervisor polls for all.

#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "file_descriptor.h"

namespace tessera::run {

/// Writes to one of the launcher's outputs without ever blocking: a reader that stalls must not
/// keep the launcher from noticing that a rank has died. (The descriptor itself stays blocking,
/// because rank 0 shares it.)
class OutputSink {
 public:
  explicit OutputSink(int fd) : fd_(fd) {}

  void add(std::string_view text) { pending_ += text; }
  bool pending() const { return !pending_.empty(); }
  /// True when so much waits that the ranks should be read no further.
  bool full() const { return pending_.size() > kFull; }
  int fd() const { return fd_; }
  /// errno of a write that failed, whose text is lost; 0: none has.
  int error() const { return error_; }

  /// Writes what fits now.
  void flush();

 private:
  /// Bytes. Beyond them the supervisor stops reading from the ranks that write here: their pipes
  /// fill, they wait, and the launcher's memory stays bounded.
  static constexpr std::size_t kFull = 1 << 20;
  bool write_some();
  std::size_t next_size() const;

  int fd_;
  int error_ = 0;
  std::string pending_;
};

/// Holds each line for a moment, in which other ranks may write the same: equal lines become one,
/// "[ranks 0-3] text". So do those of many ranks in which each names itself, "[ranks 0-63] rank
/// N: ...", and what the same ranks repeat, "[rank 1] text (40 times)". The lines of a rank stay in
/// order.
class LineMerger {
 public:
  using Clock = std::chrono::steady_clock;

  /// `hold`: how long a line waits for others. `ranks`: how many write.
  LineMerger(OutputSink& sink, Clock::duration hold, int ranks)
      : sink_(&sink), hold_(hold), joins_own_numbers_(ranks > kFewRanks) {}

  void add(int rank, const std::string& line);
  /// When the first of the lines that are held is due; nullopt: none is held.
  std::optional<Clock::time_point> due() const;
  /// Passes on the lines that are due at `now`.
  void release(Clock::time_point now);
  /// Passes on all lines; those of `last`, if they are still held, behind the others.
  void release_all(int last = -1);
  bool holds_lines_of(int rank) const;

 private:
  static constexpr int kFewRanks = 8;

  struct Line {
    std::string text;
    std::string without_number;  ///< with "rank N" for the rank's own number
    std::set<int> ranks;
    Clock::time_point since;
  };

  /// Makes the line of this number that is held one of `rank` too; nullptr if it cannot be.
  Line* join(std::ptrdiff_t index, int rank);
  void release_first();

  OutputSink* sink_;
  Clock::duration hold_;
  /// Not of few ranks: each line is then shown with its rank's own number.
  bool joins_own_numbers_;
  std::deque<Line> held_;
  std::size_t bytes_ = 0;
};

/// Reads one output of a rank and cuts it into lines. Remembers the last one.
class LineRelay {
 public:
  using TakeLine = std::function<void(const std::string& line)>;
  /// `sink`: where the lines go in the end, which may be full.
  LineRelay(FileDescriptor source, const OutputSink& sink, TakeLine take_line);

  bool open() const { return static_cast<bool>(source_); }
  int fd() const { return source_.get(); }
  const OutputSink& sink() const { return *sink_; }
  /// nullopt: there was none yet.
  const std::optional<std::string>& last_line() const { return last_line_; }

  /// Reads what is available; closes at the end of the output.
  void read_available();
  /// Reads what is available, passes an unfinished line on and closes.
  void finish();

 private:
  void take(std::string_view text);
  void end_line();

  FileDescriptor source_;
  const OutputSink* sink_;
  TakeLine take_line_;
  std::string line_;  // what came after the last newline
  std::optional<std::string> last_line_;
};

}  // namespace tessera::run

#include "rank_output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "tessera/core/flight.h"

namespace tessera::run {
namespace {

// Limits for lines that wait for others: they bound the launcher's memory and the time of a search.
constexpr std::size_t kMostBytesHeld = 1 << 20;
constexpr std::size_t kMostLinesHeld = 1000;
// A longer line is cut, so that a rank that never ends its line does not fill the memory.
constexpr std::size_t kLongestLine = 64 << 10;
constexpr int kReadsAtOnce = 16;  // so that one loud rank does not starve the others
// More ranks than these, where they are not one after another, are counted and not listed.
constexpr std::size_t kMostRanksListed = 16;

std::string without_number(std::string line, int rank) {
  const std::string own = "rank " + std::to_string(rank);
  for (auto at = line.find(own); at != std::string::npos; at = line.find(own, at + 1)) {
    const auto end = at + own.size();
    if (end == line.size() || line[end] < '0' || line[end] > '9') {
      line.replace(at, own.size(), "rank N");
    }
  }
  return line;
}

std::string names_of(const std::set<int>& ranks) {
  const bool in_a_row =
      *ranks.rbegin() - *ranks.begin() + 1 == static_cast<std::ptrdiff_t>(ranks.size());
  if (in_a_row || ranks.size() <= kMostRanksListed) {
    return flight::name_ranks({ranks.begin(), ranks.end()});
  }
  return std::to_string(ranks.size()) + " ranks from " + std::to_string(*ranks.begin()) + " to " +
         std::to_string(*ranks.rbegin());
}

}  // namespace

void OutputSink::flush() {
  while (pending() && write_some()) {
  }
}

// False where nothing more can be written now. The descriptor blocks, so poll() is asked before
// each write.
bool OutputSink::write_some() {
  pollfd ready{fd_, POLLOUT, 0};
  if (poll(&ready, 1, 0) <= 0) {
    return false;
  }
  const auto written = write(fd_, pending_.data(), next_size());
  if (written < 0 && errno != EINTR && errno != EAGAIN) {
    error_ = errno;
    pending_.clear();  // its reader has gone, or the disk is full
    return false;
  }
  pending_.erase(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  return true;
}

std::size_t OutputSink::next_size() const {
  // A pipe that is ready takes PIPE_BUF bytes without blocking; whole lines, because rank 0 writes
  // to the same place.
  const std::string_view text = std::string_view(pending_).substr(0, PIPE_BUF);
  const auto end = text.rfind('\n');
  return end == std::string_view::npos ? text.size() : end + 1;
}

void LineMerger::add(int rank, const std::string& line) {
  const std::string general = joins_own_numbers_ ? without_number(line, rank) : line;
  const auto same = std::find_if(held_.begin(), held_.end(), [&](const Line& held) {
    return (held.text == line || held.without_number == general) && !held.ranks.contains(rank);
  });
  if (Line* joined = same == held_.end() ? nullptr : join(same - held_.begin(), rank)) {
    if (joined->text != line) {
      bytes_ += general.size() - joined->text.size();
      joined->text = general;
    }
    return;
  }
  held_.push_back({line, general, {rank}, Clock::now()});
  bytes_ += line.size();
  while (bytes_ > kMostBytesHeld || held_.size() > kMostLinesHeld) {
    release_first();
  }
}

// nullptr where the order of a rank's lines would change: `rank` has a line behind this one, and so
// has a rank that wrote it.
LineMerger::Line* LineMerger::join(std::ptrdiff_t index, int rank) {
  const auto line = held_.begin() + index;
  const auto behind = [&](const std::set<int>& ranks) {
    return std::any_of(line + 1, held_.end(), [&](const Line& later) {
      return std::any_of(ranks.begin(), ranks.end(),
                         [&](int r) { return later.ranks.contains(r); });
    });
  };
  if (behind({rank})) {
    if (behind(line->ranks)) {
      return nullptr;
    }
    std::rotate(line, line + 1, held_.end());
    held_.back().ranks.insert(rank);
    return &held_.back();
  }
  line->ranks.insert(rank);
  return &*line;
}

std::optional<LineMerger::Clock::time_point> LineMerger::due() const {
  return held_.empty() ? std::nullopt : std::optional(held_.front().since + hold_);
}

void LineMerger::release(Clock::time_point now) {
  while (!held_.empty() && held_.front().since + hold_ <= now) {
    release_first();
  }
}

void LineMerger::release_all(int last) {
  std::stable_partition(held_.begin(), held_.end(),
                        [last](const Line& line) { return !line.ranks.contains(last); });
  while (!held_.empty()) {
    release_first();
  }
}

bool LineMerger::holds_lines_of(int rank) const {
  return std::any_of(held_.begin(), held_.end(),
                     [rank](const Line& line) { return line.ranks.contains(rank); });
}

void LineMerger::release_first() {
  const Line line = std::move(held_.front());
  int times = 0;
  do {
    bytes_ -= line.text.size();
    held_.pop_front();
    ++times;
  } while (!held_.empty() && held_.front().text == line.text && held_.front().ranks == line.ranks);
  sink_->add("[" + names_of(line.ranks) + "] " + line.text +
             (times > 1 ? " (" + std::to_string(times) + " times)" : "") + "\n");
}

LineRelay::LineRelay(FileDescriptor source, const OutputSink& sink, TakeLine take_line)
    : source_(std::move(source)), sink_(&sink), take_line_(std::move(take_line)) {
  fcntl(source_.get(), F_SETFL, O_NONBLOCK);
}

// An error ends the relay as the end of the file does; what was read by then has been passed on.
void LineRelay::read_available() {
  std::array<char, 16 << 10> buffer;
  for (int i = 0; i < kReadsAtOnce; ++i) {
    const auto size = read(source_.get(), buffer.data(), buffer.size());
    if (size > 0) {
      take({buffer.data(), static_cast<std::size_t>(size)});
    } else if (size == 0 || (errno != EAGAIN && errno != EINTR)) {
      source_.close();
      return;
    } else {
      return;
    }
  }
}

// For a rank that has ended. A pipe holds 64 KiB unless it was made larger, and read_available()
// takes four times as much: what the rank wrote is read to the end.
void LineRelay::finish() {
  if (open()) {
    read_available();
  }
  source_.close();
  if (!line_.empty()) {
    end_line();
  }
}

// A newline ends a line, and so does the length limit.
void LineRelay::take(std::string_view text) {
  for (const char c : text) {
    if (c == '\n') {
      end_line();
    } else {
      line_ += c;
      if (line_.size() == kLongestLine) {
        end_line();
      }
    }
  }
}

void LineRelay::end_line() {
  last_line_ = std::exchange(line_, {});
  take_line_(*last_line_);
}

}  // namespace tessera::run

#include "line_relay.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace tessera::run {
namespace {

constexpr std::size_t kLinesKept = 20;
constexpr std::size_t kLongestLine = 64 << 10;
constexpr int kReadsAtOnce = 16;  // so that one loud rank does not starve the others

}  // namespace

LineRelay::LineRelay(FileDescriptor source, std::string prefix, OutputSink& sink)
    : source_(std::move(source)), prefix_(std::move(prefix)), sink_(&sink) {
  fcntl(source_.get(), F_SETFL, O_NONBLOCK);
}

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

void LineRelay::finish() {
  if (open()) {
    read_available();
  }
  source_.close();
  if (!line_.empty()) {
    end_line();
  }
}

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
  sink_->add(prefix_);
  sink_->add(line_);
  sink_->add("\n");
  last_lines_.push_back(std::exchange(line_, {}));
  if (last_lines_.size() > kLinesKept) {
    last_lines_.pop_front();
  }
}

}  // namespace tessera::run

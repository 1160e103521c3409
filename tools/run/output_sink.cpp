#include "output_sink.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::run {

void OutputSink::flush() {
  while (pending() && write_some(0)) {
  }
}

void OutputSink::drain(int milliseconds) {
  while (pending() && write_some(milliseconds)) {
  }
}

bool OutputSink::write_some(int wait_milliseconds) {
  pollfd ready{fd_, POLLOUT, 0};
  if (poll(&ready, 1, wait_milliseconds) <= 0) {
    return false;
  }
  // A pipe that is ready takes this many bytes without blocking.
  const auto written =
      write(fd_, pending_.data(), std::min<std::size_t>(pending_.size(), PIPE_BUF));
  if (written < 0 && errno != EINTR && errno != EAGAIN) {
    pending_.clear();  // nobody reads it any more
    return false;
  }
  pending_.erase(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  return true;
}

}  // namespace tessera::run

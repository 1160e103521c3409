#include "output_sink.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::run {

void OutputSink::flush() {
  while (pending() && write_some()) {
  }
}

bool OutputSink::write_some() {
  pollfd ready{fd_, POLLOUT, 0};
  if (poll(&ready, 1, 0) <= 0) {
    return false;
  }
  const auto written = write(fd_, pending_.data(), next_size());
  if (written < 0 && errno != EINTR && errno != EAGAIN) {
    pending_.clear();  // nobody reads it any more
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

}  // namespace tessera::run

#include "file_descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"

namespace tessera::run {

// The descriptor is given up whatever close() returns: on Linux it is closed even after EINTR, and
// its number may already belong to another file.
void FileDescriptor::close() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail_errno("cannot make a pipe");
  }
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

void fill_standard_streams() {
  for (int standard = STDIN_FILENO; standard <= STDERR_FILENO; ++standard) {
    if (fcntl(standard, F_GETFD) < 0) {
      // It gets the lowest free number, which is this one.
      [[maybe_unused]] const int opened = open("/dev/null", O_RDWR);
    }
  }
}

// errno is read here, so no other call may come between the one that failed and this.
void fail_errno(const std::string& what) {
  fail(what, ": ", std::strerror(errno));
}

}  // namespace tessera::run

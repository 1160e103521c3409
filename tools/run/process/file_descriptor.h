// What the launcher holds open: descriptors with an owner, and pipes. The ends of a pipe close on
// exec, and two things rely on that: the guardian sees the end of its pipe when the launcher ends,
// so no rank may hold the other end; and a rank that was started shows it by the end of its failure
// pipe.

#pragma once

#include <string>
#include <utility>

namespace tessera::run {

/// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  // By a swap: what this object owned is closed by `other`.
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

struct Pipe {
  FileDescriptor read;
  FileDescriptor write;
};

/// A pipe whose ends are closed on exec.
Pipe make_pipe();

/// Opens /dev/null in place of a standard input or output that is closed: what is opened later must
/// not get its number.
void fill_standard_streams();

/// Throws Error: `what` and the text of errno.
[[noreturn]] void fail_errno(const std::string& what);

}  // namespace tessera::run

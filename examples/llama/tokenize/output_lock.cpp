#include "examples/llama/tokenize/output_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"

namespace llama {
namespace {

/// The process that had the lock may have removed the file between our open() and our flock().
bool has_name(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_nlink > 0;
}

}  // namespace

OutputLock::OutputLock(const std::string& prefix) : path_(prefix + ".lock") {
  while (fd_ < 0) {
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    TESSERA_CHECK(fd_ >= 0, "the folder of --out '", prefix, "' can't be written: '", path_,
                  "': ", std::strerror(errno), "; make the folder first, or name another");
    const bool is_taken = flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (is_taken || !has_name(fd_)) {
      close(fd_);
      fd_ = -1;
    }
    TESSERA_CHECK(!is_taken, "--out '", prefix,
                  "' is being written by another llama_tokenize; wait for it, or give another");
  }
}

OutputLock::~OutputLock() {
  unlink(path_.c_str());
  close(fd_);
}

}  // namespace llama

#include "tessera/core/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/core/detail/read_error.h"
#include "tessera/core/detail/text_faults.h"
#include "tessera/core/error.h"

namespace tessera::files {
namespace {

/// Throws Error with the reason from errno.
[[noreturn]] void fail_to_open(const std::filesystem::path& path, const std::string& what) {
  const int error = errno;
  throw detail::ReadError(
      detail::concat("cannot open '", path.string(), "': ", std::strerror(error), ": give ", what,
                     " that exists and may be read"),
      error == ENOENT ? path : std::filesystem::path());
}

/// Those of git-lfs are of about 130 bytes.
void check_content(const InputFile& file) {
  constexpr std::uint64_t kLeastPointer = 100, kMostPointer = 300;
  if (file.size() >= kLeastPointer && file.size() <= kMostPointer) {
    std::string text(file.size(), '\0');
    file.read_at(0, std::as_writable_bytes(std::span(text)));
    detail::refuse_lfs_pointer(file.path(), text);
  }
}

}  // namespace

InputFile::InputFile(std::filesystem::path path, std::string what, Symlinks symlinks)
    : path_(std::move(path)) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int nofollow = symlinks == Symlinks::kRefuse ? O_NOFOLLOW : 0;
  fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | nofollow);
  try {
    // What O_NOFOLLOW gives for a link.
    TESSERA_CHECK(fd_ >= 0 || errno != ELOOP, "'", path_.string(),
                  "' is a symbolic link, which is not followed here: put the file itself there");
    if (fd_ < 0) {
      fail_to_open(path_, what);
    }
    struct stat status {};
    if (fstat(fd_, &status) != 0) {
      throw detail::ReadError(
          detail::concat("cannot read '", path_.string(), "': ", std::strerror(errno)));
    }
    TESSERA_CHECK(S_ISREG(status.st_mode), "'", path_.string(), "' is not a regular file: give ",
                  what);
    size_ = static_cast<std::uint64_t>(status.st_size);
    check_content(*this);
  } catch (...) {
    close(fd_);
    throw;
  }
}

InputFile::~InputFile() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

/// pread() may return less than was asked for; 0 means that the file ends here.
void InputFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const auto got = pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw detail::ReadError(detail::concat(
          "reading '", path_.string(), "' failed: ", std::strerror(errno), ": check the disk"));
    }
    TESSERA_CHECK(got > 0, "'", path_.string(),
                  "' became shorter while it was read: let no one write to it, and read it again");
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::string read_file(const std::filesystem::path& path, const std::string& what,
                      std::uint64_t max_bytes, Symlinks symlinks) {
  const InputFile file(path, what, symlinks);
  TESSERA_CHECK(file.size() <= max_bytes, "'", path.string(), "' has ", file.size(),
                " bytes, more than the ", max_bytes, " that ", what, " may have: give ", what);
  std::string text(file.size(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace tessera::files

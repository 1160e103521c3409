#include "tessera/core/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// What the temporary names of `path` begin with.
std::string temporary_prefix(const std::filesystem::path& path) {
  std::string prefix = path.filename().string();
  return prefix.insert(0, 1, '.').append(".tmp-");
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

bool still_linked(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_nlink > 0;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  remove_stale();
  open_temporary();
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (fd_ >= 0) close(fd_);
}

void AtomicFile::open_temporary() {
  static std::atomic<int> counter{0};
  while (fd_ < 0) {
    temporary_ = folder_of(path_) / (temporary_prefix(path_) + std::to_string(getpid()) + "-" +
                                     std::to_string(counter++));
    fd_ = open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno == EEXIST) continue;
    if (fd_ < 0) {
      temporary_.clear();
      fail_system("cannot write");
    }
    // The lock tells others that the writer is alive. One that looked before it may have removed
    // the file: then take another name.
    flock(fd_, LOCK_EX | LOCK_NB);
    if (!still_linked(fd_)) close(std::exchange(fd_, -1));
  }
}

void AtomicFile::remove_stale() const {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of(path_), error)) {
    if (!entry.path().filename().string().starts_with(temporary_prefix(path_))) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
    close(fd);
  }
}

void AtomicFile::reserve(std::uint64_t bytes) {
  if (bytes == 0 || fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0) return;
  if (errno != EOPNOTSUPP) fail_system("cannot reserve room for");
}

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto written = pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_system("cannot write");
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::sync() {
  if (fsync(fd_) != 0) fail_system("cannot make durable");
}

void AtomicFile::publish() {
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_system("cannot put in place");
  temporary_.clear();
  sync_folder(folder_of(path_));
}

void AtomicFile::fail_system(const char* what) const {
  fail(what, " '", path_.string(), "': ", std::strerror(errno),
       ": check that its folder exists, may be written and has room");
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
  file.publish();
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  // Some file systems have nothing to sync for a folder, and say so with EINVAL.
  TESSERA_CHECK(synced || error == EINVAL, "cannot make the folder '", folder.string(),
                "' durable: ", std::strerror(error), ": check the disk");
}

}  // namespace tessera

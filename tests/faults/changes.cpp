#include "faults/changes.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace tessera::testing {

/// Calls can come before main() and after it.
ChangesSlot& changes_slot() {
  static auto* const slot = new ChangesSlot;
  return *slot;
}

std::uint64_t file_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

bool path_of(int fd, std::array<char, PATH_MAX>& path) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "/proc/self/fd/%d", fd);
  const int error = errno;
  const ssize_t length = readlink(name.data(), path.data(), path.size() - 1);
  errno = error;
  path[length > 0 ? static_cast<std::size_t>(length) : 0] = '\0';
  return length > 0;
}

Changes::Changes(const std::filesystem::path& folder) : folder_(folder.string()) {
  const std::lock_guard lock(changes_slot().mutex);
  changes_slot().changes = this;
}

Changes::~Changes() {
  const std::lock_guard lock(changes_slot().mutex);
  changes_slot().changes = nullptr;
}

void Changes::add(Change change) {
  if (change.path.starts_with(folder_)) {
    list_.push_back(std::move(change));
  }
}

void Changes::add(int fd, Change change) {
  std::array<char, PATH_MAX> path{};
  if (path_of(fd, path)) {
    change.path = path.data();
    change.file = file_of(fd);
    add(std::move(change));
  }
}

}  // namespace tessera::testing

// What system calls change in a folder, noted one after another: the material of a power cut.

#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing {

/// A call that came to a good end.
struct Change {
  enum Kind {
    kMakeFolder,
    kRemoveFolder,
    kCreate,
    kWrite,
    kSync,
    kRename,
    kLink,
    kUnlink
  } kind = kCreate;
  std::string path = {};  ///< of a file or folder; of writes and syncs, as the system knows it then
  std::string to = {};    ///< of a rename or link
  std::uint64_t file = 0;  ///< its inode
  off_t offset = 0;
  std::string bytes = {};
};

/// The changes of this process below `folder`, in their order, while this lives. One at a time.
class Changes {
 public:
  explicit Changes(const std::filesystem::path& folder);
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;
  ~Changes();

  const std::vector<Change>& list() const { return list_; }

  void add(Change change);
  /// For an open file or folder.
  void add(int fd, Change change);

 private:
  std::string folder_;
  std::vector<Change> list_;
};

/// Where changes go; nullptr: nowhere.
struct ChangesSlot {
  std::mutex mutex;
  std::atomic<Changes*> changes = nullptr;
};
ChangesSlot& changes_slot();

std::uint64_t file_of(int fd);
/// Whether it has one.
bool path_of(int fd, std::array<char, PATH_MAX>& path);

/// Makes a call and notes by `note(result, changes)` what it changed.
template <class Call, class Note>
auto recorded(const Call& call, const Note& note) -> decltype(call()) {
  ChangesSlot& slot = changes_slot();
  if (slot.changes == nullptr) {
    return call();
  }
  const std::lock_guard lock(slot.mutex);  // so that the order is that of the calls
  const auto result = call();
  if (Changes* changes = slot.changes; result >= 0 && changes != nullptr) {
    const int error = errno;
    note(result, *changes);
    errno = error;
  }
  return result;
}

}  // namespace tessera::testing

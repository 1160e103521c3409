// Records the changes that system calls make in a folder, and simulates a power cut.

#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing {

/// A system call that succeeded.
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

/// The changes of this process below `folder`, in order, while this exists. One at a time.
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

/// The active recorder; nullptr: none.
struct ChangesSlot {
  std::mutex mutex;
  std::atomic<Changes*> changes = nullptr;
};
ChangesSlot& changes_slot();

std::uint64_t file_of(int fd);
/// Whether it has one.
bool path_of(int fd, std::array<char, PATH_MAX>& path);

/// Makes a call and records its change by `note(result, changes)`.
template <class Call, class Note>
auto recorded(const Call& call, const Note& note) -> decltype(call()) {
  ChangesSlot& slot = changes_slot();
  if (slot.changes == nullptr) {
    return call();
  }
  const std::lock_guard lock(slot.mutex);  // so that changes have the order of the calls
  const auto result = call();
  if (Changes* changes = slot.changes; result >= 0 && changes != nullptr) {
    const int error = errno;
    note(result, *changes);
    errno = error;
  }
  return result;
}

/// What a power cut loses of changes without a sync.
enum class Lost {
  kAll,   ///< the names of files, and what is in them
  kBytes  ///< what is in files: the names have reached the disk before
};

/// Simulates a disk that keeps only synced data: fsync() of a file keeps its bytes, fsync() of a
/// folder keeps its names.
class Disk {
 public:
  /// All that is in `folder` now is durable.
  explicit Disk(const std::filesystem::path& folder);

  void apply(const Change& change);
  /// Writes the state of the folder after a power cut to `out`.
  void write_after_power_cut(const std::filesystem::path& out, Lost lost) const;

 private:
  /// A file, or a folder: 0.
  using FileId = std::uint64_t;
  using Names = std::map<std::string, FileId>;
  struct View {
    std::map<std::string, Names> folders;  ///< by path
    std::map<FileId, std::string> files;
  };

  void add_folder(const std::filesystem::path& folder);
  Names& names_beside(const std::string& path);
  void sync(const Change& change);
  void write_folder(const std::string& folder, const std::filesystem::path& out, Lost lost) const;

  std::string root_;
  View now_, durable_;
  std::map<std::uint64_t, FileId> id_of_;  ///< by inode, which the system gives again
  FileId last_ = 0;
};

}  // namespace tessera::testing

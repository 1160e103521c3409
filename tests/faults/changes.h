// Records the changes that system calls make in a folder, and simulates a power failure.

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

/// A successful system call that changed a file or a folder.
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
  std::string path = {};
  std::string to = {};     ///< `to`: the new path, for kRename and kLink
  std::uint64_t file = 0;  ///< inode number
  off_t offset = 0;
  std::string bytes = {};
};

/// Records the changes that this process makes below `folder`. Only one Changes may exist.
class Changes {
 public:
  explicit Changes(const std::filesystem::path& folder);
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;
  ~Changes();

  const std::vector<Change>& list() const { return list_; }

  void add(Change change);
  /// Records a change of the file or folder that is open as `fd`.
  void add(int fd, Change change);

 private:
  std::string folder_;
  std::vector<Change> list_;
};

/// The process's Changes object; nullptr if none exists.
struct ChangesSlot {
  std::mutex mutex;
  std::atomic<Changes*> changes = nullptr;
};
ChangesSlot& changes_slot();

std::uint64_t file_of(int fd);
bool path_of(int fd, std::array<char, PATH_MAX>& path);

template <class Call, class Note>
auto recorded(const Call& call, const Note& note) -> decltype(call()) {
  ChangesSlot& slot = changes_slot();
  if (slot.changes == nullptr) {
    return call();
  }
  const std::lock_guard lock(slot.mutex);
  const auto result = call();
  if (Changes* changes = slot.changes; result >= 0 && changes != nullptr) {
    const int error = errno;
    note(result, *changes);
    errno = error;
  }
  return result;
}

/// Selects the unsynced changes that a simulated power failure loses.
enum class Lost {
  kAll,   ///< kAll: file names and file contents
  kBytes  ///< kBytes: file contents only
};

/// A simulated disk. A power failure loses file contents written since the file's last fsync(), and
/// file names created, renamed or removed since the folder's last fsync().
class Disk {
 public:
  /// At construction, all contents of `folder` count as synced.
  explicit Disk(const std::filesystem::path& folder);

  void apply(const Change& change);
  /// Writes the contents of `folder` after a power failure to the folder `out`.
  void write_after_power_cut(const std::filesystem::path& out, Lost lost) const;

 private:
  /// A unique id of a file, because inode numbers can be used again. 0 stands for a folder.
  using FileId = std::uint64_t;
  using Names = std::map<std::string, FileId>;
  struct View {
    std::map<std::string, Names> folders;  ///< key: path of the folder
    std::map<FileId, std::string> files;
  };

  void add_folder(const std::filesystem::path& folder);
  Names& names_beside(const std::string& path);
  void sync(const Change& change);
  void write_folder(const std::string& folder, const std::filesystem::path& out, Lost lost) const;

  std::string root_;
  View now_, durable_;
  std::map<std::uint64_t, FileId> id_of_;  ///< key: inode, which can be used again
  FileId last_ = 0;
};

}  // namespace tessera::testing

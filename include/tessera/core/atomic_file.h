#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::files {

/// A file that appears completely or not at all. It is written under a temporary name next to
/// `path`, made durable by sync(), and renamed by publish(). The destructor removes a file that was
/// not published; what a killed process left is removed when a process of the same host writes the
/// same file again. All calls throw Error with the system's reason, and the constructor also for
/// the name of a device, a pipe or a socket. One thread at a time.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Allocates `bytes` on the disk, so that a full disk is noticed before the work.
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();
  /// Throws where the folder cannot be made durable as well: the file is then in place.
  void publish();
  /// Publishes unless there is a file of the name; whether it did. Of several writers at the same
  /// instant one does, where the file system has hard links.
  bool publish_new();

 private:
  void open_temporary();
  [[noreturn]] void fail_system(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::uint64_t unsynced_ = 0;
};

/// `path` from the root of the file system, so that a later chdir() does not change its meaning. An
/// empty path stays empty; also a path that cannot be resolved, because the working directory is
/// gone, is returned as it is.
std::filesystem::path absolute_path(const std::filesystem::path& path);

/// Writes `text` as such a file.
void write_file(const std::filesystem::path& path, const std::string& text);

/// The same unless there is one; whether there was none.
bool write_new_file(const std::filesystem::path& path, const std::string& text);

/// Removes remains of killed writers of this host, for files of the folder whose names satisfy
/// `of`. Errors are ignored: remains only take disk space.
void remove_leftovers(const std::filesystem::path& folder,
                      const std::function<bool(const std::string& name)>& of);

/// Makes renames and removals in a folder durable.
void sync_folder(const std::filesystem::path& folder);

/// Makes a folder and those above it, durably. Throws Error, naming the folder that cannot be made.
void create_folders(const std::filesystem::path& folder);

}  // namespace tessera::files
TESSERA_API_END

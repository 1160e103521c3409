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
/// not published. The remains of a killed process are removed when a process on the same host
/// writes the same file again. All functions throw Error with the system's reason; the constructor
/// also throws for the name of a device, a pipe or a socket. One thread at a time.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Allocates `bytes` on the disk, so that a full disk is detected before the work.
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();
  /// Renames the temporary file to `path`. Throws Error if the folder cannot be made durable; the
  /// file is then already in place.
  void publish();
  /// Publishes unless a file of the name exists; returns whether it did. If several writers publish
  /// at the same instant, one succeeds, on file systems with hard links.
  bool publish_new();

 private:
  void open_temporary();
  [[noreturn]] void fail_system(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::uint64_t unsynced_ = 0;
};

/// `path` as an absolute path, so that a later chdir() does not change its meaning. An empty path
/// stays empty. A path that cannot be resolved, because the working directory no longer exists, is
/// returned unchanged.
std::filesystem::path absolute_path(const std::filesystem::path& path);

/// Writes `text` to a file by AtomicFile.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Like write_file, unless the file exists; returns whether it was written.
bool write_new_file(const std::filesystem::path& path, const std::string& text);

/// Removes remains of killed writers on this host, for files of the folder whose names satisfy
/// `of`. Errors are ignored, because remains only take disk space.
void remove_leftovers(const std::filesystem::path& folder,
                      const std::function<bool(const std::string& name)>& of);

/// Makes renames and removals in a folder durable.
void sync_folder(const std::filesystem::path& folder);

/// Makes a folder and its parent folders durably. Throws Error with the name of the folder that
/// cannot be made.
void create_folders(const std::filesystem::path& folder);

}  // namespace tessera::files
TESSERA_API_END

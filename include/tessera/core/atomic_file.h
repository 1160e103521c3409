#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace tessera {

/// A file that appears complete or not at all: it is written under a temporary name beside `path`,
/// made durable by sync(), and renamed by publish(). Unpublished, it is removed at the end; what a
/// killed process left is removed when the same file is written again. All calls throw Error with
/// the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Takes the room on the disk, so that a full disk is noticed before the work.
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();
  void publish();

 private:
  void open_temporary();
  void remove_stale() const;
  [[noreturn]] void fail_system(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
};

/// Writes a small file so.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Makes renames and removals in a folder durable.
void sync_folder(const std::filesystem::path& folder);

}  // namespace tessera

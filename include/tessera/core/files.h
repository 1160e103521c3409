#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Throws Error unless `text` is a JSON object that every parser reads in the same way. Also
/// rejects duplicate keys, NUL bytes, a byte order mark, more than 8 nested levels, 1,000,000 keys
/// or 10,000,000 values. For untrusted files.
void check_strict_json(std::string_view text);

}  // namespace tessera

namespace tessera::files {

/// Writes `text` to a file, atomically and durably: after a crash the file has either its old
/// content or `text`. Throws Error with the system's message.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Like write_file(), but does nothing if the file exists. Returns whether the file was written. If
/// several processes write the same path at once, exactly one writes the file.
bool write_new_file(const std::filesystem::path& path, const std::string& text);

/// Makes a folder and its parent folders, and syncs the folders to the disk. Throws Error if a
/// folder cannot be made.
void create_folders(const std::filesystem::path& folder);

/// Writes what std::cout has buffered. Throws Error if standard output cannot be written.
void flush_output();

/// Whether a function accepts an input file whose path is a symbolic link.
enum class Symlinks { kFollow, kRefuse };

/// An untrusted regular file, opened for reading. If another process truncates the file, a read
/// throws Error; a memory-mapped file would end the process. All functions throw Error. Thread
/// safe.
class InputFile {
 public:
  /// Opens the file. A FIFO is rejected, without waiting for its writer. `what`: the expected kind
  /// of file, for messages ("a token shard").
  InputFile(std::filesystem::path path, std::string what, Symlinks symlinks = Symlinks::kFollow);
  ~InputFile();
  /// An InputFile can be moved, but neither copied nor assigned.
  InputFile(InputFile&& other) noexcept;

  const std::filesystem::path& path() const { return path_; }
  /// Size of the file in bytes at the time of opening.
  std::uint64_t size() const { return size_; }
  /// Fills `out` with the file's bytes from `offset` on. Throws Error if the file is too short.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

/// Returns the content of a file. Throws Error in the same cases as InputFile, and for a file of
/// more than `max_bytes` bytes, which is not read.
std::string read_file(const std::filesystem::path& path, const std::string& what,
                      std::uint64_t max_bytes, Symlinks symlinks = Symlinks::kFollow);

}  // namespace tessera::files
TESSERA_API_END

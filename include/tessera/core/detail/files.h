// Functions for files: atomic writes, exceptions for files that cannot be read, checks of file
// contents, checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Throws Error unless `text`, from an untrusted file, is a JSON object that every parser reads in
/// the same way. Rejects everything that RFC 8259 forbids, everything that parsers interpret
/// differently (duplicate keys, NUL bytes, a byte order mark), and objects of more than 8 nested
/// levels, 1,000,000 keys or 10,000,000 values.
void check_strict_json(std::string_view text);

}  // namespace tessera

namespace tessera::files {

/// Writes `text` to a file, atomically and durably: after a crash the file has either its old
/// content or `text`. Throws Error with the system's message.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Writes a file like write_file(), unless the file exists. Returns whether the file was written.
/// If several processes write the same path at the same time, exactly one of them writes the file.
bool write_new_file(const std::filesystem::path& path, const std::string& text);

/// Makes a folder and its parent folders, and syncs the folders to the disk. Throws Error if a
/// folder cannot be made.
void create_folders(const std::filesystem::path& folder);

/// Whether a function accepts an input file whose path is a symbolic link.
enum class Symlinks { kFollow, kRefuse };

/// An untrusted regular file that is open for reading. The file is read by pread() and not mapped
/// to memory. If another process truncates the file, Error is thrown; with a mapped file this
/// process would be killed. All functions throw Error with the file's name. Thread safe.
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
  /// Fills `out` with the bytes from `offset` on. Throws Error if the file is too short.
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

/// A file that is written under a temporary name next to `path`, synced to the disk by sync(), and
/// renamed to `path` by publish(). Other processes therefore never see an incomplete file. The
/// destructor removes an unpublished file. If the process is killed, the next process that writes
/// `path` on the same machine removes the temporary file. All functions throw Error with the
/// system's message. The constructor also throws if `path` is a device, a pipe or a socket. Not
/// thread safe.
class AtomicFile : tessera::detail::NoCopy {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();

  /// Allocates `bytes` on the disk, so that a full disk is detected before anything is written.
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();
  /// Renames the temporary file to `path`. Throws Error if fsync of the folder fails; the file is
  /// then complete at `path`, but can be lost in a crash.
  void publish();
  /// Calls publish() unless the file `path` exists. Returns whether the file was published. If
  /// several processes publish at the same time, exactly one succeeds, provided that the file
  /// system has hard links.
  bool publish_new();

 private:
  void open_temporary();
  [[noreturn]] void fail_system(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::uint64_t unsynced_ = 0;
};

/// Returns `path` as an absolute path, so that a later chdir() does not change its meaning. An
/// empty path stays empty. `path` is returned unchanged if the working directory no longer exists.
std::filesystem::path absolute_path(const std::filesystem::path& path);

/// Removes the temporary files that killed processes of this machine have left in `folder`.
/// `of(name)` says whether to remove the temporary files of the file `name`. Errors are ignored,
/// because a temporary file only takes disk space.
void remove_leftovers(const std::filesystem::path& folder,
                      const std::function<bool(const std::string& name)>& of);

/// Syncs a folder to the disk, so that renames and removals in the folder survive a crash.
void sync_folder(const std::filesystem::path& folder);

}  // namespace tessera::files

namespace tessera::detail {

/// The error for a file that could not be opened or read. The content of such a file is unknown,
/// and the file can become readable later.
class ReadError : public Error {
 public:
  /// `missing`: the path of the file if the file does not exist, otherwise empty.
  explicit ReadError(const std::string& message, std::filesystem::path missing = {})
      : Error(message), missing_(std::move(missing)) {}

  const std::filesystem::path& missing() const { return missing_; }

 private:
  std::filesystem::path missing_;
};

/// The byte order mark that some editors write at the beginning of a text.
inline constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

/// Returns a hint about NaN and Infinity, to append to a JSON parser's error message. Empty unless
/// `fault`, the text that the parser rejected, is NaN or Infinity.
std::string json_hint(std::string_view fault);

/// Throws Error if the content is a git-lfs pointer, which a repository contains in place of the
/// file itself.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content);

/// Computes the checksum CRC-32C (Castagnoli; RFC 3720) of `bytes`, by this processor's fastest
/// method. `before` is the checksum of the preceding bytes, so data can be passed in several calls.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// A method of computing the checksum CRC-32C: the method's name and the function.
struct Crc32cWay {
  const char* name;
  std::uint32_t (*sum)(std::span<const std::byte> bytes, std::uint32_t before);
};

/// Returns the methods of computing CRC-32C that this processor supports, the fastest first. The
/// last method uses a table and works on every processor.
std::vector<Crc32cWay> crc32c_ways();

}  // namespace tessera::detail
TESSERA_API_END

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
#include "tessera/core/files.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::files {

/// A file that is written under a temporary name. sync() writes the file to the disk. publish()
/// renames the file to `path`, so no process sees an incomplete file. The destructor removes an
/// unpublished file. All functions throw Error. The constructor also throws for devices, pipes and
/// sockets. Not thread safe.
class AtomicFile : tessera::detail::NoCopy {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();

  /// Reserves `bytes` bytes of disk space, so that a full disk is detected before data is written.
  void reserve(std::uint64_t bytes);
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();
  /// Renames the temporary file to `path`. Throws Error if fsync of the folder fails; the file is
  /// then complete at `path`, but can be lost in a crash.
  void publish();
  /// Calls publish() unless `path` exists. Returns whether the file was published. If several
  /// processes call publish_new() at once, exactly one succeeds (on a file system with hard links).
  bool publish_new();

 private:
  void open_temporary();
  [[noreturn]] void fail_system(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::uint64_t unsynced_ = 0;
};

/// Returns `path` as an absolute path, which remains valid after a chdir(). An empty path remains
/// empty. `path` is returned unchanged if the working directory no longer exists.
std::filesystem::path absolute_path(const std::filesystem::path& path);

/// Removes the temporary files of killed processes of this machine in `folder`. of(name) returns
/// whether temporary files of the target file `name` are removed. Ignores errors.
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

/// Returns a hint about NaN and Infinity, to append to a JSON parser's error message. Returns ""
/// unless `fault`, the text that the parser rejected, is NaN or Infinity.
std::string json_hint(std::string_view fault);

/// Throws Error if `content` is a git-lfs pointer: a text that a repository can contain in place of
/// the file itself.
void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content);

/// Returns the CRC-32C (RFC 3720) of `bytes`. `before`: the checksum of the preceding bytes, for
/// data that is passed in several calls.
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

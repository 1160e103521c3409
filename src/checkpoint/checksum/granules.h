// Checksums of files by granules: small enough that a reader of a part of a file checks little
// more than it reads, large enough that the sums of a file take a hundred-thousandth of it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "tessera/core/detail/rounding.h"
#include "tessera/core/input_file.h"
#include "tessera/export.h"

namespace tessera::checkpoint {

inline constexpr std::uint64_t kGranuleBytes = std::uint64_t{1} << 20;

/// How many granules a file of `bytes` has; the last may be shorter.
constexpr std::uint64_t granules_of(std::uint64_t bytes) {
  return tessera::detail::ceil_div(bytes, kGranuleBytes);
}

/// Fills `out`, of at most a granule, with the bytes of a file at `offset`, and returns their
/// CRC-32C. Each part is summed while it is in the processor's cache, and noted as progress of this
/// thread.
std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out);

TESSERA_API_FOR_TEST_BEGIN
/// The CRC-32C of each granule of a file that is written from its start to its end.
class GranuleSums {
 public:
  /// Throws Error where `bytes` do not follow those before.
  void add(std::uint64_t offset, std::span<const std::byte> bytes);

  std::uint64_t bytes() const { return bytes_; }
  const std::vector<std::uint32_t>& sums() const { return sums_; }

 private:
  std::uint64_t bytes_ = 0;
  std::vector<std::uint32_t> sums_;
};
TESSERA_API_FOR_TEST_END

/// A file whose bytes are compared with checksums while they are read. Thread safe.
class CheckedFile {
 public:
  /// `sums`: of each granule; none: nothing is compared. Throws Error if the file's size needs
  /// another number of them.
  CheckedFile(files::InputFile file, std::vector<std::uint32_t> sums);

  const std::filesystem::path& path() const { return file_.path(); }
  std::uint64_t size() const { return file_.size(); }
  /// Reads whole granules, and notes progress of this thread. Throws Error, naming the file and the
  /// place, for bytes that differ from those written.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  /// A granule that was read in part.
  struct Kept {
    std::vector<std::byte> bytes;
    std::uint64_t index = UINT64_MAX;
  };

  void read_granule(std::uint64_t index, std::span<std::byte> out) const;
  void read_part(std::uint64_t index, std::uint64_t within, std::span<std::byte> out) const;
  Kept& kept_of_this_thread() const;
  std::uint64_t bytes_of_granule(std::uint64_t index) const;

  files::InputFile file_;
  std::vector<std::uint32_t> sums_;
  // The last granule of each thread, as its short runs come in rising order. The mutex guards only
  // the map: threads do not wait for each other's reads.
  mutable std::mutex mutex_;
  mutable std::map<std::thread::id, Kept> kept_;
};

}  // namespace tessera::checkpoint

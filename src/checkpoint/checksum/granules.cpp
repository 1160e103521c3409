#include "checksum/granules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/detail/crc32c.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// Bytes that are summed at once: an eighth of a second-level cache of 2 MiB. A whole granule did
/// not stay in the cache, and took 1.9 times as long.
constexpr std::size_t kCachedBytes = std::size_t{256} << 10;

}  // namespace

std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out) {
  std::uint32_t sum = 0;
  while (!out.empty()) {
    const auto part = out.first(std::min(kCachedBytes, out.size()));
    file.read_at(offset, part);
    sum = detail::crc32c(part, sum);
    comm::note_progress(flight::Work::kReading);
    offset += part.size();
    out = out.subspan(part.size());
  }
  return sum;
}

void GranuleSums::add(std::uint64_t offset, std::span<const std::byte> bytes) {
  TESSERA_CHECK(offset == bytes_, "bytes at ", offset, " of a file were written after ", bytes_,
                ": write it from its start to its end");
  while (!bytes.empty()) {
    if (bytes_ % kGranuleBytes == 0) {
      sums_.push_back(0);
    }
    const auto room = kGranuleBytes - bytes_ % kGranuleBytes;
    const auto part = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
    sums_.back() = detail::crc32c(part, sums_.back());
    bytes_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

CheckedFile::CheckedFile(files::InputFile file, std::vector<std::uint32_t> sums)
    : file_(std::move(file)), sums_(std::move(sums)) {
  TESSERA_CHECK(sums_.empty() || sums_.size() == granules_of(file_.size()), "'", path().string(),
                "' has ", file_.size(), " bytes, but checksums of ", sums_.size(),
                " MiB: copy it again");
}

std::uint64_t CheckedFile::bytes_of_granule(std::uint64_t index) const {
  return std::min(kGranuleBytes, size() - index * kGranuleBytes);
}

void CheckedFile::read_granule(std::uint64_t index, std::span<std::byte> out) const {
  const std::uint64_t begin = index * kGranuleBytes;
  const std::uint32_t found = read_and_sum(file_, begin, out);
  TESSERA_CHECK(found == sums_[index], "bytes ", begin, " to ", begin + out.size() - 1, " of '",
                path().string(), "' are not those that were written (CRC-32C ",
                fmt::format("{:08x}, {:08x}", found, sums_[index]),
                " expected): copy the file again, or load another step");
}

CheckedFile::Kept& CheckedFile::kept_of_this_thread() const {
  const std::lock_guard lock(mutex_);
  return kept_[std::this_thread::get_id()];
}

void CheckedFile::read_part(std::uint64_t index, std::uint64_t within,
                            std::span<std::byte> out) const {
  Kept& kept = kept_of_this_thread();
  if (kept.index != index) {
    kept.index = UINT64_MAX;  // not valid until the bytes have been checked
    kept.bytes.resize(bytes_of_granule(index));
    read_granule(index, kept.bytes);
    kept.index = index;
  }
  std::memcpy(out.data(), kept.bytes.data() + within, out.size());
}

void CheckedFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  // The file's own message for what lies behind its end.
  if (offset + out.size() > size()) {
    return file_.read_at(offset, out);
  }
  while (!out.empty()) {
    const std::uint64_t index = offset / kGranuleBytes;
    const std::uint64_t within = offset % kGranuleBytes;
    const auto part = out.first(std::min(bytes_of_granule(index) - within, out.size()));
    if (sums_.empty()) {
      file_.read_at(offset, part);
      comm::note_progress(flight::Work::kReading);
    } else if (part.size() == bytes_of_granule(index)) {
      read_granule(index, part);
    } else {
      read_part(index, within, part);
    }
    offset += part.size();
    out = out.subspan(part.size());
  }
}

}  // namespace tessera::checkpoint

#include "tessera/data/fingerprint.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>

#include "tessera/core/detail/crc32c.h"
#include "tessera/core/input_file.h"

namespace tessera::data {
namespace {

constexpr std::uint64_t kPieces = 64;
constexpr std::uint64_t kPieceBytes = 4096;

/// Where the pieces of a file begin: one behind the other if they cover it.
std::vector<std::uint64_t> piece_offsets(std::uint64_t bytes) {
  std::vector<std::uint64_t> offsets;
  if (bytes <= kPieces * kPieceBytes) {
    for (std::uint64_t offset = 0; offset < bytes; offset += kPieceBytes) {
      offsets.push_back(offset);
    }
    return offsets;
  }
  for (std::uint64_t i = 0; i < kPieces; ++i) {
    offsets.push_back(i * (bytes - kPieceBytes) / (kPieces - 1));
  }
  return offsets;
}

}  // namespace

FileFingerprint fingerprint(const std::string& path) {
  const files::InputFile file(path, "a file of training data");
  FileFingerprint result{std::filesystem::path(path).filename().string(), file.size(), 0};
  std::vector<std::byte> piece;
  for (const std::uint64_t offset : piece_offsets(file.size())) {
    piece.resize(std::min(kPieceBytes, file.size() - offset));
    file.read_at(offset, piece);
    result.sum = detail::crc32c(piece, result.sum);
  }
  return result;
}

std::vector<FileFingerprint> fingerprints(const std::vector<std::string>& files) {
  std::vector<FileFingerprint> results;
  std::ranges::transform(files, std::back_inserter(results), fingerprint);
  return results;
}

}  // namespace tessera::data

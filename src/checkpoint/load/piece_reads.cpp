#include "load/piece_reads.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include "load/task_threads.h"
#include "tessera/core/detail/read_error.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// A thread for less would cost more than it saves.
constexpr std::int64_t kLeastBytesOfAThread = std::int64_t{4} << 20;

void read_piece(const SafetensorsFile& file, const std::string& name,
                std::span<const std::int64_t> from, const at::Tensor& target) {
  try {
    file.read_into(name, from, target);
  } catch (const detail::ReadError&) {
    throw;
  } catch (const Error& error) {
    fail("tensor '", name, "': ", error.what());
  }
}

}  // namespace

/// A piece is in memory in the file's type too, which may be the wider one.
void PieceReads::add(const SafetensorsFile& file, const std::string& name,
                     std::span<const std::int64_t> from, const at::Tensor& target) {
  const std::int64_t width = std::max(
      target.element_size(), static_cast<std::int64_t>(c10::elementSize(file.entry(name).dtype)));
  for_each_piece(target.sizes(), limits_.piece_bytes / width, [&](auto offset, auto sizes) {
    const at::Tensor piece = block_at(target, offset, sizes);
    pieces_.push_back({[&file, name, place = moved(from, offset), piece] {
                         read_piece(file, name, place, piece);
                       },
                       static_cast<std::int64_t>(piece.nbytes())});
  });
  bytes_ += static_cast<std::int64_t>(target.nbytes());
}

/// Each thread that needs a part of a shared MiB reads it. So a thread takes several neighbours at
/// a time: few shares, but more of them than threads, which may differ in speed.
void PieceReads::run() {
  const auto threads = std::clamp<std::int64_t>(bytes_ / kLeastBytesOfAThread, 1, limits_.threads);
  const std::int64_t bytes_of_share = std::max(bytes_ / (4 * threads), kLeastBytesOfAThread);
  std::vector<std::function<void()>> shares;
  for (std::size_t first = 0, end = 0; first < pieces_.size(); first = end) {
    for (std::int64_t bytes = 0; end < pieces_.size() && bytes < bytes_of_share; ++end) {
      bytes += pieces_[end].bytes;
    }
    shares.push_back([this, first, end] {
      for (std::size_t i = first; i < end; ++i) {
        pieces_[i].read();
      }
    });
  }
  run_on_threads(static_cast<int>(threads), shares);
}

}  // namespace tessera::checkpoint

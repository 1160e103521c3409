#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "blocks/blocks.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// Buffers for reading hold at most a piece for each thread.
struct ReadLimits {
  int threads = 4;
  std::int64_t piece_bytes = kMostPieceBytes;
};

/// Fills blocks of memory from files, a piece at a time, by several threads where there is much.
class PieceReads {
 public:
  explicit PieceReads(const ReadLimits& limits = {}) : limits_(limits) {}

  /// Notes that `target` is to be filled with the values of a tensor of `file` at `from`, converted
  /// to its type. The file must outlive run().
  void add(const SafetensorsFile& file, const std::string& name, std::span<const std::int64_t> from,
           const at::Tensor& target);
  /// Reads the added pieces in order. Throws the error of the first read that fails; an Error that
  /// is not about reading itself names the tensor.
  void run();

 private:
  struct Piece {
    std::function<void()> read;
    std::int64_t bytes;
  };
  ReadLimits limits_;
  std::vector<Piece> pieces_;
  std::int64_t bytes_ = 0;
};

}  // namespace tessera::checkpoint

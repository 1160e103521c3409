#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/data/token_source.h"

namespace tessera::data {

/// Batches of `batch` sequences of `sequence` tokens. Sample n = step * batch + i, modulo
/// floor((N - 1) / S), is tokens [n * S, n * S + S + 1): inputs are its first S, targets its last
/// S. Throws Error if there are fewer samples than `batch`, or for a token id outside [0,
/// vocabulary) among the first 2^26 tokens; later ones are checked when they are read. Every rank
/// makes the same loader and loads its own rows: nothing is communicated, and a run continues from
/// any step.
class BatchLoader {
 public:
  BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
              std::int64_t vocabulary);

  struct Batch {
    at::Tensor inputs;   ///< (rows, S) int64, on the CPU
    at::Tensor targets;  ///< (rows, S) int64, on the CPU
  };
  /// Rows [first, last) of the batch of `step` (0-based). Throws Error for a token id outside
  /// [0, vocabulary), with its position.
  Batch load(std::int64_t step, std::int64_t first, std::int64_t last) const;
  /// Distinct samples: after this many the data repeats.
  std::int64_t samples() const { return samples_; }

 private:
  void check_start() const;
  void check_vocabulary(std::int64_t begin, std::span<const std::int64_t> tokens) const;

  TokenSourcePtr tokens_;
  std::int64_t batch_, sequence_, vocabulary_, samples_;
};

}  // namespace tessera::data

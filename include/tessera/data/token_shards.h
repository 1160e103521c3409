#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::data {

/// A sequence of token ids that is read in place.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t size() const = 0;
  /// Tokens [begin, begin + out.size()) as int64.
  virtual void read(std::int64_t begin, std::span<std::int64_t> out) const = 0;
};
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// The memory-mapped llm.c shards that match a glob, in sorted order, as one sequence (header of 256
/// int32: magic 20240520 and uint16 tokens, or 20240801 and uint32; version; count). Throws Error
/// for no match, a bad magic or version, or a file shorter than its count.
TokenSourcePtr open_token_shards(const std::string& glob);
/// Tokens in memory.
TokenSourcePtr make_token_source(std::vector<std::int64_t> tokens);

/// Batches of `batch` sequences of `sequence` tokens. Sample n = step * batch + i, modulo
/// floor((N - 1) / sequence), is tokens [n * S, n * S + S + 1): inputs are its first S, targets its
/// last S. Throws Error if there are fewer samples than `batch`.
class BatchLoader {
 public:
  BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
              std::int64_t vocabulary);
  struct Batch {
    at::Tensor inputs;   ///< (rows, S) int64
    at::Tensor targets;  ///< (rows, S) int64
  };
  /// Rows [first, last) of the batch of `step` (0-based). Throws Error for a token id outside
  /// [0, vocabulary), with its position.
  Batch load(std::int64_t step, std::int64_t first, std::int64_t last) const;
  std::int64_t samples() const { return samples_; }

 private:
  TokenSourcePtr tokens_;
  std::int64_t batch_, sequence_, vocabulary_, samples_;
};

}  // namespace tessera::data

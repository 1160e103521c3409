// What attention keeps of a text that grows by one token a call.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// Keys and values of the positions so far of a batch of texts, in memory that is allocated once,
/// so that a token costs the same to append however many came before. A model with a sliding window
/// keeps the last `window` positions only, each in the place of the one that has left the window.
class KvCache {
 public:
  /// What one layer's attention has kept.
  struct Layer {
    at::Tensor keys, values;  ///< (batch, heads, slots, head_dim), or what attention reads of them
  };

  /// For texts of at most `positions` positions, `padding` included: of text i the first padding[i]
  /// hold no token, so that texts of different lengths end together. `window`: 0 for none.
  KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding = {0});

  /// How many there may be, and how many there are so far.
  std::int64_t positions() const { return positions_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& padding() const { return padding_; }
  bool padded() const;

  /// Keeps the keys and values, (batch, heads, tokens, head_dim), of the positions that follow.
  /// Returns those that the queries of these positions may look at: of a prompt, which comes first,
  /// its own, else all that are kept.
  Layer append(std::size_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Says that all layers have appended `count` positions.
  void advance(std::int64_t count) { tokens_ += count; }

  /// Which of the keys that append() returns for one position the query may see, as a mask of
  /// (batch, 1, 1, keys); undefined: all of them.
  at::Tensor mask(c10::Device device) const;

 private:
  Layer& layer_like(std::size_t layer, const at::Tensor& keys);
  void write(const at::Tensor& slots, const at::Tensor& values) const;

  std::int64_t positions_, slots_;
  std::vector<std::int64_t> padding_;
  std::int64_t tokens_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace tessera::models
TESSERA_API_END

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The keys and values of a batch of texts, for all positions so far, in memory that is allocated
/// once. With a sliding window, only the last `window` positions are stored, in a ring.
class KvCache {
 public:
  /// The cached keys and values of one layer.
  struct Layer {
    at::Tensor keys,
        values;  ///< (batch, heads, slots, head_dim); from append(): the part to attend to
  };

  /// A cache for texts of at most `positions` positions, including `padding`. The first padding[i]
  /// positions of text i have no token, so that texts of different lengths end at the same
  /// position. `window` is the sliding window; 0: none.
  KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding = {0});

  std::int64_t positions() const { return positions_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& padding() const { return padding_; }
  bool padded() const;

  /// Appends the keys and values, (batch, heads, tokens, head_dim), of the next positions. Returns
  /// the keys and values to which the queries of these positions attend: in the first call the keys
  /// and values of the prompt, in later calls all keys and values in the cache.
  Layer append(std::size_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Advances the cache by `count` positions, after all layers have appended these positions.
  void advance(std::int64_t count) { tokens_ += count; }

  /// The mask, (batch, 1, 1, keys), of the keys from append() that the query of a single new
  /// position may attend to. Undefined: the query may attend to all keys.
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

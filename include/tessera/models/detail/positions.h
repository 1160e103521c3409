// The parts of a Llama that depend on positions: rotary embedding, and the key-value cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// "rope_scaling" of a config.json: how the frequencies of a rotary embedding are scaled. The names
/// are those of Hugging Face.
struct RopeScaling {
  enum class Kind {
    kNone,
    kLinear,  ///< all frequencies are divided by `factor` (Chen et al. 2023)
    kLlama3,  ///< low frequencies are divided by `factor`, with a smooth transition (Llama 3.1)
    kYarn,    ///< YaRN (Peng et al. 2023), with an attention temperature
  };
  Kind kind = Kind::kNone;
  double factor = 1;
  /// The context length of pretraining, in tokens. kLlama3 and kYarn scale a rotary frequency by a
  /// factor that depends on the number of rotations within this length.
  std::int64_t original_positions = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< kLlama3: transition bounds, in rotations
  double beta_fast = 32, beta_slow = 1;              ///< kYarn: transition bounds, in rotations
  bool truncate = true;         ///< kYarn: whether the transition bounds are rounded to integers
  double attention_factor = 1;  ///< kYarn: factor by which cos and sin are multiplied

  bool operator==(const RopeScaling&) const = default;
};

/// The parameters of a model's rotary embedding.
struct Rope {
  double theta = 10000;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
};

/// Returns cos and sin of the rotary angles of `positions` positions, as in Hugging Face: two fp32
/// CPU tensors (positions, head_dim). Both halves of a head have the same angles.
std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t positions);

/// The keys and values of a batch of texts, in memory that is allocated once. With a sliding
/// window, a ring buffer stores only the last `window` positions.
class KvCache {
 public:
  /// The cached keys and values of one layer.
  struct Layer {
    at::Tensor keys,
        values;  ///< tensors of sizes (batch, heads, stored positions, head_dim)
  };

  /// Makes a cache for texts of at most `positions` positions, including `padding`. The first
  /// padding[i] positions of text i have no token. `window`: size of the sliding window; 0 means no
  /// window.
  KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding = {0});

  std::int64_t positions() const { return positions_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<std::int64_t>& padding() const { return padding_; }
  bool padded() const;

  /// Appends keys and values of the next positions, (batch, heads, tokens, head_dim). Returns the
  /// keys and values for attention: in the first call those of the prompt, later the whole cache.
  Layer append(std::size_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Advances the cache by `count` positions, after all layers have appended these positions.
  void advance(std::int64_t count) { tokens_ += count; }

  /// Returns the mask for a single new position, (batch, 1, 1, keys), over the keys that append()
  /// returned. An undefined mask excludes no key.
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

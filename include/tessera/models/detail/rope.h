#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// "rope_scaling" of a config.json: how the frequencies of a rotary embedding are scaled. The names
/// are Hugging Face's.
struct RopeScaling {
  enum class Kind {
    kNone,
    kLinear,   ///< all frequencies / factor (Chen et al. 2023)
    kDynamic,  ///< a larger theta for longer sequences (NTK-aware)
    kLlama3,   ///< low frequencies / factor, with a ramp to the unscaled high frequencies
               ///< (Llama 3.1)
    kYarn,     ///< the ramp of Peng et al. 2023, with an attention temperature
  };
  Kind kind = Kind::kNone;
  double factor = 1;
  /// The context length of pretraining, in tokens. kDynamic scales only longer sequences. kLlama3
  /// and kYarn count the rotations within this length.
  std::int64_t original_positions = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< kLlama3: rotation counts that bound the
                                                     ///< ramp
  double beta_fast = 32, beta_slow = 1;              ///< kYarn: rotation counts that bound the ramp
  bool truncate = true;         ///< kYarn: whether the ramp's bounds are rounded to integers
  double attention_factor = 1;  ///< kYarn: factor on cos and sin

  bool operator==(const RopeScaling&) const = default;
};

/// The parameters of a model's rotary embedding.
struct Rope {
  double theta = 10000;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
  /// Whether the rotary angles of a sequence of `length` tokens depend on the length of the
  /// sequence.
  bool depends_on_length(std::int64_t length) const {
    return scaling.kind == RopeScaling::Kind::kDynamic && length > scaling.original_positions;
  }
};

/// Returns cos and sin of the rotary angles of positions [first, last) in a sequence of `length`
/// tokens: (last - first, head_dim) each, fp32, repeated for the two halves of a head, as Hugging
/// Face computes them.
std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t first, std::int64_t last,
                                              std::int64_t length, c10::Device device);

}  // namespace tessera::models
TESSERA_API_END

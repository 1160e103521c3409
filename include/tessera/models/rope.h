// Rotary position embedding and its scalings for contexts beyond those of pretraining.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// "rope_scaling" of a config.json; the names are Hugging Face's.
struct RopeScaling {
  /// How the frequencies are scaled.
  enum class Kind {
    kNone,
    kLinear,   ///< all frequencies / factor (Chen et al. 2023)
    kDynamic,  ///< a larger theta, by the length of the sequence (NTK-aware)
    kLlama3,   ///< low frequencies / factor, a ramp to the high ones (Llama 3.1)
    kYarn,     ///< the ramp of Peng et al. 2023, and warmer attention
  };
  Kind kind = Kind::kNone;
  double factor = 1;
  /// The context of pretraining: beyond it the dynamic kind scales, and the others count turns in
  /// it.
  std::int64_t original_positions = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< of kLlama3
  double beta_fast = 32, beta_slow = 1;              ///< of kYarn: turns that bound the ramp
  bool truncate = true;                              ///< of kYarn: the bounds are whole
  double attention_factor = 1;                       ///< of kYarn: multiplies cos and sin

  bool operator==(const RopeScaling&) const = default;
};

/// A model's rotary embedding.
struct Rope {
  double theta = 10000;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
  /// Whether the angles depend on how long the sequence is, for one of `length` tokens.
  bool depends_on_length(std::int64_t length) const {
    return scaling.kind == RopeScaling::Kind::kDynamic && length > scaling.original_positions;
  }
};

/// cos and sin of the angles of the positions [first, last) in a sequence of `length` tokens, twice
/// over for the two halves of a head: (last - first, head_dim) each, fp32, as Hugging Face computes
/// them.
std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t first, std::int64_t last,
                                              std::int64_t length, c10::Device device);

}  // namespace tessera::models
TESSERA_API_END

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// FLOPs per token, forward and backward, without recomputation.
struct ModelFlops {
  double per_token = 0;         ///< 6 (N - N_embedding) + 12 L hidden S: torchtitan's formula
  double per_token_causal = 0;  ///< the same without the masked half of attention
};
/// `hidden` is heads * head_dim, `sequence` the number of tokens in a sample. If the embedding is
/// tied to the output, its parameters take part in a product: pass 0 for `embedding_parameters`.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence);

/// Peak FLOP/s of a device's dense matrix products in `type`, by its name ("NVIDIA H100 80GB
/// HBM3"); nullopt if the table lacks it, for example for a CPU, or a type other than bf16, fp16
/// and fp32. Makers' figures, without sparsity; fp32 as libtorch computes it by default, without
/// TF32.
std::optional<double> peak_flops(const std::string& device_name,
                                 c10::ScalarType type = c10::kBFloat16);

}  // namespace tessera::observe
TESSERA_API_END

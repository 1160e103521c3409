#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::observe {

/// FLOPs of one token, forward and backward, without recomputation.
struct ModelFlops {
  double per_token = 0;         ///< 6 (N - N_embedding) + 12 L hidden S: torchtitan's formula
  double per_token_causal = 0;  ///< the same with the masked half of attention left out
};
/// `hidden` is heads * head_dim. Where the embedding is tied to the output, its parameters do
/// compute: pass 0 for `embedding_parameters`.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence);

/// Dense bf16 peak of a device by its name ("NVIDIA H100 80GB HBM3"), FLOP/s; nullopt if it is not
/// in the table, for example a CPU. Makers' figures without sparsity.
std::optional<double> peak_flops(const std::string& device_name);

}  // namespace tessera::observe

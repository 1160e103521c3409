#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of convert_to_fp8().
struct Fp8Options {
  /// FQN patterns of Linears that are not converted (see matches_fqn): {"lm_head"}.
  std::vector<std::string> exclude{};
  /// A Linear is converted only if both sizes of its weight are multiples of this number.
  /// at::_scaled_mm requires 16. With tensor parallelism each rank's shard must have such sizes:
  /// use 16 * ranks.
  std::int64_t multiple_of = 16;
};

/// Experimental, until a GPU shows a speed-up of at least 1.15 at hidden size 4096.
///
/// Makes the Linears below `module`, including FusedLinears, compute their matrix products in
/// float8_e4m3fn: forward, the input's gradient and the weight's gradient. Each row along which a
/// matrix product sums has its own scale (docs/fp8.md has error bounds). Parameters keep their type
/// in files and in the optimizer. Call convert_to_fp8() before apply_lora (the adapters' matrices
/// are not converted), parallelize_module and fully_shard.
///
/// On a GPU the computation type must be bf16. A Linear whose matrix product is fused with another
/// operation (Linear::forward with a function) is computed by that function in its own type.
///
/// Not collective; every rank must convert the same Linears. Throws Error, before anything is
/// changed, for a pattern that matches no Linear, for a Linear that is already converted or has an
/// adapter, and for a weight that is already distributed. Returns the FQNs of the converted
/// Linears; the others are excluded, have sizes that are not divisible, or a tied weight.
std::vector<std::string> convert_to_fp8(ModuleBase& module, const Fp8Options& options = {});

/// Whether convert_to_fp8() has converted `linear`.
bool is_fp8(const Linear& linear);

}  // namespace tessera::nn
TESSERA_API_END

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of convert_to_fp8().
struct Fp8Options {
  /// Patterns of the FQNs of Linears that stay as they are (see matches_fqn): {"lm_head"}.
  std::vector<std::string> exclude{};
  /// Linears stay as they are unless it divides both sizes of the weight. 16: what at::_scaled_mm
  /// takes; with tensor parallelism each rank's share must have such sizes: 16 * ranks.
  std::int64_t multiple_of = 16;
};

/// What convert_to_fp8() has done: FQNs of Linears.
struct Fp8Conversion {
  std::vector<std::string> converted{};
  std::vector<std::string> left{};  ///< excluded, of other sizes, or with a tied weight
};

/// From now on the Linears below `module`, FusedLinears too, compute their three products in
/// float8_e4m3fn with a scale for each row along which a product sums: forward, the gradient of the
/// input and that of the weight (kernels/fp8.h; docs/fp8.md has bounds of the error). Parameters
/// stay as they are, in files and for the optimizer. To be called before apply_lora, whose matrices
/// then stay in their type, parallelize_module and fully_shard.
///
/// On a GPU the type of computation must be bf16. A Linear whose product is fused with something
/// else (Linear::forward with a function) is computed there, in its type.
///
/// Not collective; every rank must convert the same. Throws Error, before anything is changed, for
/// a pattern that matches no Linear, a Linear that is converted already or has an adapter, and a
/// weight that is distributed already.
Fp8Conversion convert_to_fp8(ModuleBase& module, const Fp8Options& options = {});

/// Whether convert_to_fp8() has converted it.
bool is_fp8(const Linear& linear);
/// The weights of all of these at and below `module`.
NamedSlots fp8_weights(const ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END

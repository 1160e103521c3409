#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/nn/attention.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Causal mask with a window: (tokens, tokens), true where a query sees a key. A query sees at most
/// `window` positions, including its own; 0: all earlier positions.
at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device);

/// `options` with kv_heads and head_dim filled in. Throws Error for options that Attention's
/// constructor refuses.
AttentionOptions completed(AttentionOptions options);

}  // namespace tessera::nn
TESSERA_API_END

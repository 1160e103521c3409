// What attention is given: sizes that fit, and distributed queries, keys and values, of which each
// rank has whole heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace tessera::nn {

using Attend =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

/// Throws Error, which begins with `call`, unless q, k and v are (batch, heads, tokens, width) of
/// the same sequences and tokens, with as many heads or with key and value heads that divide them,
/// and for a window below 0.
void check_attention(const char* call, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, std::int64_t window);

/// `attend` of each rank's own heads; laid out as q. Throws Error, which begins with `call`, unless
/// all three are split by heads alone, or with `by_batch` by sequences too.
at::Tensor attend_to_local_heads(const char* call, bool by_batch, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const Attend& attend);

}  // namespace tessera::nn

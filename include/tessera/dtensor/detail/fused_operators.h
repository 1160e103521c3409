#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "tessera/dtensor/detail/row_losses.h"
#include "tessera/dtensor/random.h"
#include "tessera/export.h"

/// Functions that call this library's operators ("tessera::silu_mul" and so on, src/dtensor/fused/)
/// on plain and distributed tensors. nn/functional.h documents their results.
TESSERA_API_BEGIN
namespace tessera::detail {

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);
/// Dropout of x. `first_element`: the index of x's first element in the global tensor that one mask
/// covers.
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element = 0);
/// RMSNorm of x. An undefined `weight` stands for ones.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// Returns the RMSNorm of x + residual, and x + residual itself.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);
/// x weight^T in fp8 (kernels/detail/fused.h). Differentiable.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);
/// The cross entropy of each row: (tokens), with the layout of the logits' rows. If the vocabulary
/// is sharded, collective: two all-reduces (row_losses).
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const RowLossOptions& options = {});
/// Causal attention of the queries of several chunks to the keys of the whole sequence, without a
/// mask of chunk * keys elements. q: (batch, heads, tokens, width), chunks of equal length, one
/// after another. `firsts`: the position of each chunk's first token. k, v: (batch, kv heads,
/// sequence, width). `window`: positions that a query sees, including its own; 0: all. `documents`:
/// offsets as in nn::Documents::offsets(); a query sees only its own document. If `documents` is
/// empty, a query sees its whole sequence.
at::Tensor chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             c10::IntArrayRef firsts, std::int64_t window = 0,
                             c10::IntArrayRef documents = {});

}  // namespace tessera::detail
TESSERA_API_END

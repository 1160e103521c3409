#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fused/fused_operator.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {

// These functions call the kernels of libtorch's attention directly: scaled_dot_product_attention
// does not return the log-sum-exp. A backward kernel needs the log-sum-exp of its forward kernel.

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double scale_of(const at::Tensor& q) {
  return 1 / std::sqrt(static_cast<double>(q.size(-1)));
}

at::Tensor padded_to(const at::Tensor& tensor, std::int64_t multiple, double value = 0) {
  const std::int64_t missing = detail::round_up(tensor.size(-1), multiple) - tensor.size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing}, value);
}

at::Tensor cut(const at::Tensor& tensor, std::int64_t width) {
  return tensor.size(-1) == width ? tensor : tensor.narrow(-1, 0, width);
}

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

/// Expands the mask to all heads and aligns the mask's rows to 16 elements, as GPU kernels need.
std::optional<at::Tensor> aligned_mask(const at::Tensor& mask, const at::Tensor& q) {
  if (!mask.defined()) {
    return std::nullopt;
  }
  return cut(padded_to(mask, 16), mask.size(-1))
      .expand({q.size(0), q.size(1), mask.size(0), mask.size(1)});
}

// Computes attention by matrix products and softmax, for inputs that no fused kernel supports.

at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, const SeenKeys& seen) {
  at::Tensor scores = widened(q).matmul(widened(k).transpose(2, 3)).mul_(scale_of(q));
  if (seen.causal) {
    scores.masked_fill_(at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu_(1),
                        -kInfinity);
  }
  return seen.mask.defined() ? scores.add_(seen.mask) : scores;
}

AttentionPart by_formula(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const SeenKeys& seen) {
  const at::Tensor scores = scores_of(q, k, seen);
  at::Tensor log_sum_exp = scores.logsumexp(-1);
  const at::Tensor weights = scores.sub(log_sum_exp.unsqueeze(-1)).exp_();
  return {weights.matmul(widened(v)).to(q.scalar_type()), std::move(log_sum_exp)};
}

AttentionGradients by_formula_backward(const at::Tensor& grad, const at::Tensor& q,
                                       const at::Tensor& k, const at::Tensor& v,
                                       const AttentionPart& whole, const SeenKeys& seen) {
  const at::Tensor weights = scores_of(q, k, seen).sub_(whole.log_sum_exp.unsqueeze(-1)).exp_();
  const at::Tensor of_out = widened(grad);
  const at::Tensor mean = of_out.mul(whole.out).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores =
      of_out.matmul(widened(v).transpose(2, 3)).sub_(mean).mul_(weights).mul_(scale_of(q));
  const auto type = q.scalar_type();
  return {of_scores.matmul(widened(k)).to(type),
          of_scores.transpose(2, 3).matmul(widened(q)).to(type),
          weights.transpose(2, 3).matmul(of_out).to(type)};
}

// Functions that call the flash attention kernels. The CPU kernel accepts a mask. The GPU kernel
// needs a head width that is a multiple of 8.

bool is_on_host(const at::Tensor& q) {
  return q.is_cpu() || q.is_meta();
}

AttentionPart by_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const SeenKeys& seen) {
  if (is_on_host(q)) {
    auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0, seen.causal, optional_tensor(seen.mask));
    return {std::move(out), std::move(log_sum_exp)};
  }
  auto results = at::_scaled_dot_product_flash_attention(
      padded_to(q, 8), padded_to(k, 8), padded_to(v, 8), 0, seen.causal, false, scale_of(q));
  return {cut(std::get<0>(results), v.size(-1)), std::get<1>(results)};
}

AttentionGradients by_flash_backward(const at::Tensor& grad, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const AttentionPart& whole, const SeenKeys& seen) {
  if (is_on_host(q)) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, whole.out, whole.log_sum_exp, 0, seen.causal, optional_tensor(seen.mask));
  }
  // Without dropout (probability 0), the backward kernel reads no random state.
  const auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_backward(
      padded_to(grad, 8), padded_to(q, 8), padded_to(k, 8), padded_to(v, 8),
      padded_to(whole.out, 8), whole.log_sum_exp, {}, {}, q.size(2), k.size(2), 0, seen.causal, {},
      {}, scale_of(q));
  return {cut(of_q, q.size(-1)), cut(of_k, k.size(-1)), cut(of_v, v.size(-1))};
}

// Functions that call the memory-efficient kernel, which pads the log-sum-exp to 32 queries.

AttentionPart by_efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_efficient_attention(
      q, k, v, aligned_mask(seen.mask, q), /*compute_log_sumexp=*/true, 0, seen.causal);
  return {std::get<0>(results), cut(std::get<1>(results), q.size(2))};
}

AttentionGradients by_efficient_backward(const at::Tensor& grad, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const AttentionPart& whole, const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_efficient_attention_backward(
      grad, q, k, v, aligned_mask(seen.mask, q).value_or(at::Tensor()), whole.out,
      padded_to(whole.log_sum_exp, 32, kInfinity), {}, {}, 0, {true, true, true, false},
      seen.causal);
  return {std::get<0>(results), std::get<1>(results), std::get<2>(results)};
}

// Functions that call the cuDNN attention kernel. In some releases of libtorch the log-sum-exp of
// this kernel has an additional last dimension of size 1.

std::atomic<bool>& has_column() {
  static std::atomic<bool> of_this_libtorch{true};
  return of_this_libtorch;
}

AttentionPart by_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const SeenKeys& seen) {
  auto results = at::_scaled_dot_product_cudnn_attention(
      q, k, v, aligned_mask(seen.mask, q), /*compute_log_sumexp=*/true, 0, seen.causal);
  const at::Tensor& log_sum_exp = std::get<1>(results);
  has_column() = log_sum_exp.dim() == 4;
  return {std::get<0>(results), has_column() ? log_sum_exp.squeeze(-1) : log_sum_exp};
}

AttentionGradients by_cudnn_backward(const at::Tensor& grad, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const AttentionPart& whole, const SeenKeys& seen) {
  return at::_scaled_dot_product_cudnn_attention_backward(
      grad, q, k, v, whole.out, has_column() ? whole.log_sum_exp.unsqueeze(-1) : whole.log_sum_exp,
      {}, {}, aligned_mask(seen.mask, q).value_or(at::Tensor()), {}, {}, q.size(2), k.size(2), 0,
      seen.causal);
}

struct Calls {
  AttentionPart (*forward)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const SeenKeys&);
  AttentionGradients (*backward)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const AttentionPart&, const SeenKeys&);
};

Calls calls_of(at::SDPBackend backend) {
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return {&by_flash, &by_flash_backward};
    case at::SDPBackend::efficient_attention:
      return {&by_efficient, &by_efficient_backward};
    case at::SDPBackend::cudnn_attention:
      return {&by_cudnn, &by_cudnn_backward};
    default:
      return {&by_formula, &by_formula_backward};
  }
}

at::Tensor sum_heads(const at::Tensor& grad, std::int64_t kv_heads) {
  return grad.unflatten(1, {kv_heads, grad.size(1) / kv_heads}).sum(2);
}

}  // namespace

AttentionKernel kernel_of_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SeenKeys& seen) {
  if (q.is_meta()) {
    return {at::SDPBackend::flash_attention, false};
  }
  AttentionKernel kernel = choose_attention(q, k, v, backend_of_libtorch(seen.causal, seen.mask));
  const bool has_kernel = kernel.backend == at::SDPBackend::flash_attention ||
                          kernel.backend == at::SDPBackend::efficient_attention ||
                          kernel.backend == at::SDPBackend::cudnn_attention;
  kernel.repeats_heads |= !has_kernel && q.size(1) != k.size(1);
  return kernel;
}

AttentionPart attention_part(const AttentionKernel& kernel, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen) {
  const Calls calls = calls_of(kernel.backend);
  if (!kernel.repeats_heads) {
    return calls.forward(q, k, v, seen);
  }
  const std::int64_t heads = q.size(1);
  return calls.forward(q, repeat_heads(k, heads), repeat_heads(v, heads), seen);
}

AttentionGradients attention_part_backward(const AttentionKernel& kernel, const at::Tensor& grad,
                                           const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionPart& whole,
                                           const SeenKeys& seen) {
  const Calls calls = calls_of(kernel.backend);
  // The backward kernels need the log-sum-exp in the contiguous format in which the forward kernels
  // write it.
  const AttentionPart given{whole.out, whole.log_sum_exp.contiguous()};
  if (!kernel.repeats_heads) {
    return calls.backward(grad, q, k, v, given, seen);
  }
  const std::int64_t heads = q.size(1), kv_heads = k.size(1);
  const auto [of_q, of_k, of_v] =
      calls.backward(grad, q, repeat_heads(k, heads), repeat_heads(v, heads), given, seen);
  return {of_q, sum_heads(of_k, kv_heads), sum_heads(of_v, kv_heads)};
}

void merge(AttentionPart& merged, const AttentionPart& part) {
  at::Tensor log_sum_exp = at::logaddexp(merged.log_sum_exp, part.log_sum_exp);
  const auto share = [&](const at::Tensor& own) {
    return own.sub(log_sum_exp).exp_().unsqueeze(-1);
  };
  merged.out =
      merged.out.mul(share(merged.log_sum_exp)).addcmul_(part.out, share(part.log_sum_exp));
  merged.log_sum_exp = std::move(log_sum_exp);
}

// Attention by libtorch's kernels. The operator is CompositeImplicitAutograd, because libtorch's
// operators have gradients and sharding rules. kv heads are repeated for grouped queries; otherwise
// libtorch would choose its slow math back end.

namespace {

/// Returns a plain tensor with the global sizes of `tensor`, for which libtorch chooses the same
/// kernel on all ranks.
at::Tensor stand_in(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return tensor;
  }
  // libtorch reads only sizes and strides of this tensor, and requires a contiguous last dimension.
  const at::Tensor row = at::empty({tensor.size(-1)}, local_tensor(tensor).options());
  return row.requires_grad_(tensor.requires_grad()).expand(tensor.sizes());
}

AttentionKernel kernel_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          bool causal, const at::Tensor& mask, double dropout) {
  const at::Tensor seen = mask.defined() ? stand_in(mask) : mask;
  return choose_attention(stand_in(q), stand_in(k), stand_in(v),
                          backend_of_libtorch(causal, seen, dropout));
}

/// Whether check_fused() must refuse the slow math back end: autograd records, and there is no
/// dropout. Calls with dropout always use the math back end on a GPU (docs/random.md).
bool in_training(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout) {
  return c10::GradMode::is_enabled() && dropout == 0 && q.numel() > 0 &&
         (q.requires_grad() || k.requires_grad() || v.requires_grad());
}

bool repeats_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                   const at::Tensor& mask, double dropout) {
  const bool training = in_training(q, k, v, dropout);
  if (q.is_cpu() || (q.size(1) == k.size(1) && !training)) {
    return false;
  }
  const AttentionKernel kernel = kernel_of(q, k, v, causal, mask, dropout);
  if (training) {
    check_fused(kernel, q, k, mask.defined());
  }
  return kernel.repeats_heads;
}

at::Tensor run_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                         const OptionalTensor& mask, double dropout) {
  if (q.is_meta()) {
    // Meta tensors are computed here, because libtorch has no C++ meta kernel for masked attention.
    return q.matmul(repeat_heads(k, q.size(1)).transpose(2, 3))
        .softmax(-1)
        .matmul(repeat_heads(v, q.size(1)));
  }
  if (repeats_heads(q, k, v, causal, mask.value_or(at::Tensor()), dropout)) {
    return at::scaled_dot_product_attention(q, repeat_heads(k, q.size(1)),
                                            repeat_heads(v, q.size(1)), mask, dropout, causal);
  }
  return at::scaled_dot_product_attention(q, k, v, mask, dropout, causal, std::nullopt,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}

/// Whether the program permits libtorch's math back end, on all threads.
std::atomic<bool>& math_is_allowed() {
  static std::atomic<bool> allowed = false;
  return allowed;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, bool causal=False, Tensor? mask=None, "
      "float dropout=0.0) -> Tensor",
      &run_attention);
}

}  // namespace

at::Tensor window_term(const KeyWindow& window, const at::Tensor& q) {
  const std::vector<std::int64_t> sizes{window.queries, window.keys};
  const at::Tensor after = at::full(sizes, -kInfinity, q.options()).triu_(window.own + 1);
  return after.add_(at::full(sizes, -kInfinity, q.options()).tril_(window.own - window.length));
}

at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t heads) {
  return kv.unsqueeze(2).expand({-1, -1, heads / kv.size(1), -1, -1}).flatten(1, 2);
}

AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask, double dropout) {
  return [causal, dropout, mask = optional_tensor(mask)](const at::Tensor& q, const at::Tensor& k,
                                                         const at::Tensor& v) {
    return static_cast<at::SDPBackend>(at::_fused_sdp_choice(q, k, v, mask, dropout, causal,
                                                             std::nullopt, q.size(1) != k.size(1)));
  };
}

AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask) {
  const at::SDPBackend as_given = ask(q, k, v);
  if (as_given != at::SDPBackend::math || q.is_cpu() || q.size(1) == k.size(1)) {
    return {as_given, false};
  }
  // libtorch chooses an attention kernel by sizes only. To ask without copying heads, `ask` gets
  // views of one head, expanded to the number of query heads.
  const auto of_sizes = [&](const at::Tensor& kv) {
    return kv.slice(1, 0, 1).expand({-1, q.size(1), -1, -1});
  };
  const at::SDPBackend repeated = ask(q, of_sizes(k), of_sizes(v));
  return {repeated, repeated != at::SDPBackend::math};
}

void allow_math_attention(bool allowed) {
  math_is_allowed() = allowed;
}

void check_fused(const AttentionKernel& kernel, const at::Tensor& q, const at::Tensor& k,
                 bool masked) {
  TESSERA_CHECK(kernel.backend != at::SDPBackend::math || math_is_allowed(), "attention of ",
                q.size(1), " heads of ", q.size(3), " features over ", k.size(2), " tokens in ",
                q.scalar_type(), masked ? " with a mask" : "", " on ", q.device(),
                " has no fused kernel: training would store all attention scores of each layer; "
                "train in bf16, fp16 or fp32 with a multiple of 8 features per head, at most 256, "
                "or call nn::allow_math_attention(true) (llama_train --allow-math-attention)");
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::attention", "")
                             .typed<decltype(run_attention)>();
  return op.call(q, k, v, causal, optional_tensor(mask), dropout);
}

// Chunked attention. Each chunk of a sequence needs two kernel calls: unmasked for the keys before
// the chunk, causal for the chunk's own keys. The results are merged by log-sum-exp (Liu et al.
// 2023).

namespace {

struct ChunkedAttention
    : FusedOperator<ChunkedAttention,
                    TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               c10::IntArrayRef, std::int64_t, c10::IntArrayRef)> {
  static constexpr const char* name = "tessera::chunked_attention";
  static constexpr const char* signature =
      "(Tensor q, Tensor k, Tensor v, int[] firsts, int window=0, int[] documents=[]) "
      "-> (Tensor out, Tensor log_sum_exp)";
};

struct ChunkedAttentionBackward
    : FusedOperator<ChunkedAttentionBackward,
                    AttentionGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       c10::IntArrayRef, std::int64_t, c10::IntArrayRef)> {
  static constexpr const char* name = "tessera::chunked_attention_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, int[] firsts, "
      "int window=0, int[] documents=[]) -> (Tensor, Tensor, Tensor)";
};

constexpr std::int64_t kTokensDim = 2;

struct Range {
  std::int64_t first = 0, length = 0;
  std::int64_t end() const { return first + length; }
  at::Tensor of(const at::Tensor& tensor, std::int64_t dim = kTokensDim) const {
    return tensor.narrow(dim, first, length);
  }
};

struct Block {
  enum Kind { kFull, kCausal, kMasked };
  Range keys;
  Kind kind = kFull;
};

/// Returns the ranges of keys that the queries at the positions `chunk` see. For each range, every
/// query sees at least one key.
std::vector<Block> blocks_of(Range chunk, std::int64_t window) {
  const std::int64_t end = chunk.end();
  const Block square{chunk, Block::kCausal};
  std::int64_t full = 0;
  std::vector<Block> blocks;
  if (window > 0 && window < end) {
    const std::int64_t first = std::max<std::int64_t>(0, chunk.first - window + 1);
    if (window <= chunk.length) {
      return {{{first, end - first}, Block::kMasked}};
    }
    full = end - window + 1;
    blocks.push_back({{first, full - first}, Block::kMasked});
  }
  if (full < chunk.first) {
    blocks.push_back({{full, chunk.first - full}, Block::kFull});
  }
  blocks.push_back(square);
  return blocks;
}

/// Queries that one attention call computes: all queries of a chunk, or only the chunk's queries of
/// one document.
struct Piece {
  Range sequences;  ///< range of indices of sequences in the batch
  Range rows;       ///< range of token indices in q
  Range keys;       ///< range of token indices in k, with all keys that the queries see
  /// The positions of the queries, relative to the first key in `keys`.
  Range queries() const { return {keys.length - rows.length, rows.length}; }

  at::Tensor of_queries(const at::Tensor& tensor) const { return rows.of(sequences.of(tensor, 0)); }
  at::Tensor of_keys(const at::Tensor& tensor) const { return keys.of(sequences.of(tensor, 0)); }
};

/// Appends the queries of each document in `chunk` as a Piece. `offsets`: the starts of documents,
/// as in chunked_attention(). `sequence`: the number of tokens of one sequence.
void append_of_documents(std::vector<Piece>& pieces, const Piece& chunk, std::int64_t sequence,
                         c10::IntArrayRef offsets) {
  for (std::int64_t row = 0; row < chunk.sequences.length; ++row) {
    const std::int64_t origin = row * sequence;
    const std::int64_t begin = origin + chunk.queries().first, end = origin + chunk.keys.end();
    for (const auto* next = std::ranges::upper_bound(offsets, begin);
         next != offsets.end() && next[-1] < end; ++next) {
      const std::int64_t from = std::max(next[-1], begin), to = std::min(next[0], end);
      pieces.push_back({{row, 1},
                        {chunk.rows.first + from - begin, to - from},
                        {next[-1] - origin, to - next[-1]}});
    }
  }
}

void check_documents(const at::Tensor& k, c10::IntArrayRef offsets) {
  const std::int64_t tokens = k.size(0) * k.size(kTokensDim);
  bool in_sequences =
      offsets.front() == 0 && offsets.back() == tokens && std::ranges::is_sorted(offsets);
  for (std::int64_t row = 0; row < tokens; row += k.size(kTokensDim)) {
    in_sequences = in_sequences && std::ranges::binary_search(offsets, row);
  }
  TESSERA_CHECK(in_sequences, "chunked attention: the keys have sizes ", k.sizes(),
                " and the documents begin at ", offsets,
                "; pass the first token of each document, counted over the tokens of all sequences "
                "in order, then the number of tokens; each sequence must begin a document");
}

std::vector<Piece> pieces_of(const at::Tensor& q, const at::Tensor& k, c10::IntArrayRef firsts,
                             c10::IntArrayRef documents) {
  const auto count = std::ssize(firsts);
  TESSERA_CHECK(q.dim() == 4 && k.dim() == 4 && count > 0 && q.size(kTokensDim) % count == 0,
                "chunked attention: queries of sizes ", q.sizes(), " and keys of sizes ", k.sizes(),
                " do not fit ", count, " chunks; pass (batch, heads, tokens, width) tensors, with ",
                "query tokens divisible by the number of chunks");
  if (!documents.empty()) {
    check_documents(k, documents);
  }
  const bool whole_sequences = std::ssize(documents) <= q.size(0) + 1;
  const std::int64_t length = q.size(kTokensDim) / count, sequence = k.size(kTokensDim);
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t first = firsts[static_cast<std::size_t>(i)];
    TESSERA_CHECK(first >= 0 && first + length <= sequence, "chunked attention: a chunk of ",
                  length, " queries begins at position ", first, ", but there are ", sequence,
                  " keys; pass the keys of the whole sequence");
    const Piece chunk{{0, q.size(0)}, {i * length, length}, {0, first + length}};
    if (whole_sequences) {
      pieces.push_back(chunk);
    } else {
      append_of_documents(pieces, chunk, sequence, documents);
    }
  }
  return pieces;
}

/// Makes an uninitialised tensor with the memory order (batch, tokens, heads, width), because the
/// output projection reads the result of attention in this order.
at::Tensor by_tokens(const at::Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

struct BlockCall {
  BlockCall(const Block& block, Range chunk, std::int64_t window, const at::Tensor& queries,
            const at::Tensor& all_k, const at::Tensor& all_v)
      : q(queries), k(block.keys.of(all_k)), v(block.keys.of(all_v)) {
    seen.causal = block.kind == Block::kCausal;
    if (block.kind == Block::kMasked) {
      // The mask is cheap compared to the attention scores: at most chunk * (chunk + window)
      // elements, or chunk^2 for a longer window.
      seen.mask = window_term({.queries = chunk.length,
                               .keys = block.keys.length,
                               .own = chunk.first - block.keys.first,
                               .length = window},
                              q);
    }
    kernel = kernel_of_part(q, k, v, seen);
  }

  const at::Tensor& q;
  at::Tensor k, v;
  SeenKeys seen;
  AttentionKernel kernel;
};

AttentionPart attention_of_piece(const Piece& piece, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, std::int64_t window) {
  const at::Tensor queries = piece.of_queries(q), keys = piece.of_keys(k),
                   values = piece.of_keys(v);
  AttentionPart merged;
  for (const Block& block : blocks_of(piece.queries(), window)) {
    const BlockCall call(block, piece.queries(), window, queries, keys, values);
    AttentionPart part = attention_part(call.kernel, call.q, call.k, call.v, call.seen);
    if (merged.out.defined()) {
      merge(merged, part);
    } else {
      merged = std::move(part);
    }
  }
  return merged;
}

TwoTensors run_chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 c10::IntArrayRef firsts, std::int64_t window,
                                 c10::IntArrayRef documents) {
  const at::Tensor out = by_tokens(q);
  const auto statistics = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor log_sum_exp = at::empty(q.sizes().slice(0, 3), q.options().dtype(statistics));
  for (const Piece& piece : pieces_of(q, k, firsts, documents)) {
    const AttentionPart part = attention_of_piece(piece, q, k, v, window);
    piece.of_queries(out).copy_(part.out);
    piece.of_queries(log_sum_exp).copy_(part.log_sum_exp);
  }
  return {out, log_sum_exp};
}

AttentionGradients run_chunked_attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                                  const at::Tensor& k, const at::Tensor& v,
                                                  const at::Tensor& out,
                                                  const at::Tensor& log_sum_exp,
                                                  c10::IntArrayRef firsts, std::int64_t window,
                                                  c10::IntArrayRef documents) {
  const at::Tensor of_q = by_tokens(q).zero_();
  const at::Tensor of_k = at::zeros(k.sizes(), k.options());
  const at::Tensor of_v = at::zeros(v.sizes(), v.options());
  for (const Piece& piece : pieces_of(q, k, firsts, documents)) {
    const at::Tensor queries = piece.of_queries(q), of_out = piece.of_queries(grad);
    const at::Tensor keys = piece.of_keys(k), values = piece.of_keys(v);
    const AttentionPart whole{piece.of_queries(out), piece.of_queries(log_sum_exp)};
    for (const Block& block : blocks_of(piece.queries(), window)) {
      const BlockCall call(block, piece.queries(), window, queries, keys, values);
      const auto [term_of_q, term_of_k, term_of_v] =
          attention_part_backward(call.kernel, of_out, call.q, call.k, call.v, whole, call.seen);
      piece.of_queries(of_q).add_(term_of_q);
      block.keys.of(piece.of_keys(of_k)).add_(term_of_k);
      block.keys.of(piece.of_keys(of_v)).add_(term_of_v);
    }
  }
  return {of_q, of_k, of_v};
}

/// The factors (einsum index letters) of chunked attention. Heads can be sharded; the batch only
/// without documents, because document offsets refer to the whole batch. Query heads are split into
/// (kv heads, group).
struct ChunkFactors {
  rules::TensorFactors queries, keys, statistics;
};

std::optional<ChunkFactors> add_factors_of(ShardingRule& rule, const rules::Sizes& q,
                                           const rules::Sizes& k, bool documents) {
  if (q.size() != 4 || k.size() != 4 || k[1] == 0 || q[1] % k[1] != 0) {
    return std::nullopt;
  }
  const int batch = documents ? rules::add_unsharded(rule, q[0]) : rules::add_factor(rule, q[0]);
  const int kv = rules::add_factor(rule, k[1]);
  const int group = rules::add_unsharded(rule, q[1] / k[1]);
  rules::forbid_empty_shards(rule);
  const int tokens = rules::add_unsharded(rule, q[2]), keys = rules::add_unsharded(rule, k[2]);
  const int width = rules::add_unsharded(rule, q[3]);
  return ChunkFactors{{{batch}, {kv, group}, {tokens}, {width}},
                      {{batch}, {kv}, {keys}, {width}},
                      {{batch}, {kv, group}, {tokens}}};
}

template <bool kBackward>
std::optional<ShardingRule> chunked_attention_rule(const OpCall& call) {
  constexpr std::size_t kQueries = kBackward ? 1 : 0, kDocuments = kBackward ? 8 : 5;
  ShardingRule rule = rules::start(call);
  const auto f = add_factors_of(rule, call.tensor(kQueries).sizes, call.tensor(kQueries + 1).sizes,
                                /*documents=*/!call.integers(kDocuments).empty());
  if (!f) {
    return std::nullopt;
  }
  if (kBackward) {
    rule.inputs = {f->queries, f->queries, f->keys, f->keys, f->queries, f->statistics};
    rule.outputs = {f->queries, f->keys, f->keys};
  } else {
    rule.inputs = {f->queries, f->keys, f->keys};
    rule.outputs = {f->queries, f->statistics};
  }
  return rule;
}

TwoTensors differentiable_chunked_attention(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, c10::IntArrayRef firsts,
                                            std::int64_t window, c10::IntArrayRef documents) {
  if (!is_recorded(q, k, v)) {
    return ChunkedAttention::call_below_autograd(q, k, v, firsts, window, documents);
  }
  const auto backward = [firsts = firsts.vec(), window, documents = documents.vec()](
                            FusedNode& node, const variable_list& gradients) {
    auto [of_q, of_k, of_v] =
        ChunkedAttentionBackward::call(gradients[0], node.saved(0), node.saved(1), node.saved(2),
                                       node.saved(3), node.saved(4), firsts, window, documents);
    return variable_list{of_q, of_k, of_v};
  };
  const auto node =
      formula_node("chunked_attention", "ChunkedAttentionBackward", backward, q, k, v);
  TwoTensors result = ChunkedAttention::call_below_autograd(q, k, v, firsts, window, documents);
  // Saves result.detach(), because the result owns the node: a node that saved the result itself
  // would be in a reference cycle and never be freed.
  node->save(q, k, v, std::get<0>(result).detach(), std::get<1>(result));
  node->record(std::get<0>(result));
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<ChunkedAttention>(library, &run_chunked_attention, chunked_attention_rule<false>,
                           &differentiable_chunked_attention);
  define<ChunkedAttentionBackward>(library, &run_chunked_attention_backward,
                                   chunked_attention_rule<true>);
}

}  // namespace

at::Tensor chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             c10::IntArrayRef firsts, std::int64_t window,
                             c10::IntArrayRef documents) {
  return std::get<0>(ChunkedAttention::call(q, k, v, firsts, window, documents));
}

}  // namespace tessera::detail

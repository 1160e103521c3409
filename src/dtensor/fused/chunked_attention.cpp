// Causal attention of chunks of a sequence to the keys of all of it. The keys before a chunk are
// seen by all its queries, its own as a causal square: two calls of kernels, neither with a mask
// tensor, which would take chunk * keys elements and a slower kernel. They are merged by their
// log-sum-exp, in forward as in blockwise and ring attention (Liu et al. 2023), in backward by
// giving each the merged result. The merged results alone are kept.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "fused/attention_part.h"
#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::detail {
namespace {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

struct ChunkedAttention
    : FusedOperator<ChunkedAttention,
                    TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               c10::IntArrayRef, std::int64_t)> {
  static constexpr const char* name = "tessera::chunked_attention";
  static constexpr const char* signature =
      "(Tensor q, Tensor k, Tensor v, int[] firsts, int window=0) "
      "-> (Tensor out, Tensor log_sum_exp)";
};

struct ChunkedAttentionBackward
    : FusedOperator<ChunkedAttentionBackward,
                    AttentionGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       c10::IntArrayRef, std::int64_t)> {
  static constexpr const char* name = "tessera::chunked_attention_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, int[] firsts, "
      "int window=0) -> (Tensor, Tensor, Tensor)";
};

/// Dimension of the tokens in (batch, heads, tokens, width).
constexpr std::int64_t kTokensDim = 2;

/// Consecutive tokens.
struct Range {
  std::int64_t first = 0, length = 0;
  at::Tensor of(const at::Tensor& tensor) const { return tensor.narrow(kTokensDim, first, length); }
};

/// Keys that the queries of a chunk see in one way.
struct Block {
  enum Kind { kFull, kCausal, kMasked };
  Range keys;
  Kind kind = kFull;
};

/// The blocks of the queries at `chunk`, each query of which sees a key in each.
std::vector<Block> blocks_of(Range chunk, std::int64_t window) {
  const std::int64_t end = chunk.first + chunk.length;
  const Block square{chunk, Block::kCausal};
  // Whatever the last query sees all others see, but for the square.
  std::int64_t full = 0;
  std::vector<Block> blocks;
  if (window > 0 && window < end) {
    const std::int64_t first = std::max<std::int64_t>(0, chunk.first - window + 1);
    if (window <= chunk.length) {
      return {{{first, end - first}, Block::kMasked}};
    }
    full = end - window + 1;  // the last query sees one key in the block before
    blocks.push_back({{first, full - first}, Block::kMasked});
  }
  if (full < chunk.first) {
    blocks.push_back({{full, chunk.first - full}, Block::kFull});
  }
  blocks.push_back(square);
  return blocks;
}

/// A term of the scores, in their type: another one would be converted in each call. At most
/// chunk * (chunk + window) elements with a window within the chunk, and chunk^2 with a longer one;
/// made where it is used, as it is a small part of the work on the scores.
at::Tensor mask_of(Range queries, Range keys, std::int64_t window, const at::Tensor& q) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const std::int64_t own = queries.first - keys.first;  // the first query's own key
  const std::vector<std::int64_t> sizes{queries.length, keys.length};
  const at::Tensor mask = at::full(sizes, kHidden, q.options()).triu_(own + 1);
  return mask.add_(at::full(sizes, kHidden, q.options()).tril_(own - window));
}

/// What is the same in forward and backward.
struct Chunks {
  Chunks(const at::Tensor& q, const at::Tensor& k, c10::IntArrayRef first_positions,
         std::int64_t seen_window)
      : firsts(first_positions), window(seen_window) {
    const auto count = std::ssize(firsts);
    TESSERA_CHECK(q.dim() == 4 && k.dim() == 4 && count > 0 && q.size(kTokensDim) % count == 0,
                  "attention of ", count, " chunks was asked for with queries of sizes ", q.sizes(),
                  " and keys of ", k.sizes(),
                  "; pass (batch, heads, tokens, width), of chunks of equal length");
    length = q.size(kTokensDim) / count;
    for (const std::int64_t first : firsts) {
      TESSERA_CHECK(first >= 0 && first + length <= k.size(kTokensDim), "attention of ", length,
                    " queries from position ", first, " was asked for with ", k.size(kTokensDim),
                    " keys; pass the keys of the whole sequence");
    }
  }

  /// Calls `visit(rows, chunk)` for each: its rows in q, and its positions.
  template <class Visit>
  void each(const Visit& visit) const {
    for (std::size_t i = 0; i < firsts.size(); ++i) {
      visit(Range{static_cast<std::int64_t>(i) * length, length}, Range{firsts[i], length});
    }
  }

  c10::IntArrayRef firsts;
  std::int64_t window = 0, length = 0;
};

/// Memory as (batch, tokens, heads, width), as projections read it.
at::Tensor by_tokens(const at::Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

/// The inputs of a block's call.
struct BlockCall {
  BlockCall(const Block& block, Range chunk, std::int64_t window, const at::Tensor& queries,
            const at::Tensor& all_k, const at::Tensor& all_v)
      : q(queries), k(block.keys.of(all_k)), v(block.keys.of(all_v)) {
    seen.causal = block.kind == Block::kCausal;
    if (block.kind == Block::kMasked) {
      seen.mask = mask_of(chunk, block.keys, window, q);
    }
    kernel = kernel_of_part(q, k, v, seen);
  }

  const at::Tensor& q;
  at::Tensor k, v;
  SeenKeys seen;
  AttentionKernel kernel;
};

TwoTensors run_chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 c10::IntArrayRef firsts, std::int64_t window) {
  const Chunks chunks(q, k, firsts, window);
  const at::Tensor out = by_tokens(q);
  std::vector<at::Tensor> log_sum_exp;
  chunks.each([&](Range rows, Range chunk) {
    const at::Tensor queries = rows.of(q);
    AttentionPart merged;
    for (const Block& block : blocks_of(chunk, window)) {
      const BlockCall call(block, chunk, window, queries, k, v);
      AttentionPart part = attention_part(call.kernel, call.q, call.k, call.v, call.seen);
      if (merged.out.defined()) {
        merge(merged, part);
      } else {
        merged = std::move(part);
      }
    }
    rows.of(out).copy_(merged.out);
    log_sum_exp.push_back(merged.log_sum_exp);
  });
  return {out, at::cat(log_sum_exp, kTokensDim).contiguous()};
}

AttentionGradients run_chunked_attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                                  const at::Tensor& k, const at::Tensor& v,
                                                  const at::Tensor& out,
                                                  const at::Tensor& log_sum_exp,
                                                  c10::IntArrayRef firsts, std::int64_t window) {
  const Chunks chunks(q, k, firsts, window);
  const at::Tensor of_q = by_tokens(q).zero_();
  const at::Tensor of_k = at::zeros(k.sizes(), k.options());
  const at::Tensor of_v = at::zeros(v.sizes(), v.options());
  chunks.each([&](Range rows, Range chunk) {
    const at::Tensor queries = rows.of(q), of_out = rows.of(grad);
    const AttentionPart whole{rows.of(out), rows.of(log_sum_exp)};
    for (const Block& block : blocks_of(chunk, window)) {
      const BlockCall call(block, chunk, window, queries, k, v);
      const auto [term_of_q, term_of_k, term_of_v] =
          attention_part_backward(call.kernel, of_out, call.q, call.k, call.v, whole, call.seen);
      rows.of(of_q).add_(term_of_q);
      block.keys.of(of_k).add_(term_of_k);
      block.keys.of(of_v).add_(term_of_v);
    }
  });
  return {of_q, of_k, of_v};
}

/// Batch and heads may be sharded. With fewer kv heads than heads (Ainslie et al. 2023) the heads
/// are the factors (kv heads, group).
struct ChunkFactors {
  rules::TensorFactors queries, keys, statistics;
};

std::optional<ChunkFactors> add_factors_of(ShardingRule& rule, const rules::Sizes& q,
                                           const rules::Sizes& k) {
  if (q.size() != 4 || k.size() != 4 || k[1] == 0 || q[1] % k[1] != 0) {
    return std::nullopt;
  }
  const int batch = rules::add_factor(rule, q[0]), kv = rules::add_factor(rule, k[1]);
  const int group = rules::add_unsharded(rule, q[1] / k[1]);
  rules::forbid_empty_shards(rule);
  const int tokens = rules::add_unsharded(rule, q[2]), keys = rules::add_unsharded(rule, k[2]);
  const int width = rules::add_unsharded(rule, q[3]);
  return ChunkFactors{{{batch}, {kv, group}, {tokens}, {width}},
                      {{batch}, {kv}, {keys}, {width}},
                      {{batch}, {kv, group}, {tokens}}};
}

std::optional<ShardingRule> chunked_attention_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const auto f = add_factors_of(rule, call.tensor(0).sizes, call.tensor(1).sizes);
  if (!f) {
    return std::nullopt;
  }
  rule.inputs = {f->queries, f->keys, f->keys};
  rule.outputs = {f->queries, f->statistics};
  return rule;
}

std::optional<ShardingRule> chunked_attention_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const auto f = add_factors_of(rule, call.tensor(1).sizes, call.tensor(2).sizes);
  if (!f) {
    return std::nullopt;
  }
  rule.inputs = {f->queries, f->queries, f->keys, f->keys, f->queries, f->statistics};
  rule.outputs = {f->queries, f->keys, f->keys};
  return rule;
}

struct ChunkedAttentionNode final : FusedNode {
  ChunkedAttentionNode() : FusedNode("chunked_attention", "ChunkedAttentionBackward") {}
  std::vector<std::int64_t> firsts;
  std::int64_t window = 0;

 private:
  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    auto [of_q, of_k, of_v] = ChunkedAttentionBackward::call(gradient, saved(0), saved(1), saved(2),
                                                             saved(3), saved(4), firsts, window);
    return {of_q, of_k, of_v};
  }
};

TwoTensors differentiable_chunked_attention(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, c10::IntArrayRef firsts,
                                            std::int64_t window) {
  const auto node = node_for<ChunkedAttentionNode>(q, k, v);
  TwoTensors result = ChunkedAttention::call_below_autograd(q, k, v, firsts, window);
  if (node != nullptr) {
    // Not the result itself, which holds the node.
    node->save(q, k, v, std::get<0>(result).detach(), std::get<1>(result));
    node->firsts = firsts.vec();
    node->window = window;
    node->record(std::get<0>(result));
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<ChunkedAttention>(library, &run_chunked_attention, chunked_attention_rule,
                           &differentiable_chunked_attention);
  define<ChunkedAttentionBackward>(library, &run_chunked_attention_backward,
                                   chunked_attention_backward_rule);
}

}  // namespace

at::Tensor chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             c10::IntArrayRef firsts, std::int64_t window) {
  return std::get<0>(ChunkedAttention::call(q, k, v, firsts, window));
}

}  // namespace tessera::detail

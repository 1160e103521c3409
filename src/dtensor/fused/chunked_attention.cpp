// Causal attention of chunks of a sequence to the keys of all of it. The keys before a chunk are
// seen by all its queries, its own as a causal square: two calls of kernels, neither with a mask
// tensor, which would take chunk * keys elements and a slower kernel. They are merged by their
// log-sum-exp, in forward as in blockwise and ring attention (Liu et al. 2023), in backward by
// giving each the merged result. The merged results alone are kept. A document's
// queries in a chunk are computed as a chunk by themselves: of the sequence that is this document.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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

/// Dimension of the tokens in (batch, heads, tokens, width).
constexpr std::int64_t kTokensDim = 2;

/// Consecutive tokens, or sequences.
struct Range {
  std::int64_t first = 0, length = 0;
  std::int64_t end() const { return first + length; }
  at::Tensor of(const at::Tensor& tensor, std::int64_t dim = kTokensDim) const {
    return tensor.narrow(dim, first, length);
  }
};

/// Keys that the queries of a chunk see in one way.
struct Block {
  enum Kind { kFull, kCausal, kMasked };
  Range keys;
  Kind kind = kFull;
};

/// The blocks of the queries at `chunk`, each query of which sees a key in each.
std::vector<Block> blocks_of(Range chunk, std::int64_t window) {
  const std::int64_t end = chunk.end();
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

/// Queries that attend alike: those of a chunk, or of a document's part of it.
struct Piece {
  Range sequences;  ///< of the batch
  Range rows;       ///< of q's tokens
  Range keys;       ///< of k's tokens; the queries see none beyond these
  /// The positions of the queries, counted from the first of `keys`.
  Range queries() const { return {keys.length - rows.length, rows.length}; }

  at::Tensor of_queries(const at::Tensor& tensor) const { return rows.of(sequences.of(tensor, 0)); }
  at::Tensor of_keys(const at::Tensor& tensor) const { return keys.of(sequences.of(tensor, 0)); }
};

/// Appends the part of each document that has queries in `chunk`. `offsets`: where documents begin,
/// as chunked_attention() takes them; `sequence`: the length of one.
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
  TESSERA_CHECK(in_sequences, "attention of chunks to keys of sizes ", k.sizes(),
                " was given documents that begin at ", offsets,
                "; pass where each begins among the tokens of all sequences, one sequence after "
                "another, and last the number of these tokens");
}

/// What is the same in forward and backward.
std::vector<Piece> pieces_of(const at::Tensor& q, const at::Tensor& k, c10::IntArrayRef firsts,
                             c10::IntArrayRef documents) {
  const auto count = std::ssize(firsts);
  TESSERA_CHECK(q.dim() == 4 && k.dim() == 4 && count > 0 && q.size(kTokensDim) % count == 0,
                "attention of ", count, " chunks was asked for with queries of sizes ", q.sizes(),
                " and keys of ", k.sizes(),
                "; pass (batch, heads, tokens, width), of chunks of equal length");
  if (!documents.empty()) {
    check_documents(k, documents);
  }
  const bool whole_sequences =
      std::ssize(documents) <= q.size(0) + 1;  // one document each, or none
  const std::int64_t length = q.size(kTokensDim) / count, sequence = k.size(kTokensDim);
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t first = firsts[static_cast<std::size_t>(i)];
    TESSERA_CHECK(first >= 0 && first + length <= sequence, "attention of ", length,
                  " queries from position ", first, " was asked for with ", sequence,
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
      // At most chunk * (chunk + window) elements with a window within the chunk, and chunk^2 with
      // a longer one; made where it is used, as it is a small part of the work on the scores.
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

/// Batch and heads may be sharded, but for a batch of documents, whose places are the whole one's.
/// With fewer kv heads than heads (Ainslie et al. 2023) the heads
/// are the factors (kv heads, group).
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

std::optional<ShardingRule> chunked_attention_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const auto f = add_factors_of(rule, call.tensor(0).sizes, call.tensor(1).sizes,
                                /*documents=*/!call.integers(5).empty());
  if (!f) {
    return std::nullopt;
  }
  rule.inputs = {f->queries, f->keys, f->keys};
  rule.outputs = {f->queries, f->statistics};
  return rule;
}

std::optional<ShardingRule> chunked_attention_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const auto f = add_factors_of(rule, call.tensor(1).sizes, call.tensor(2).sizes,
                                /*documents=*/!call.integers(8).empty());
  if (!f) {
    return std::nullopt;
  }
  rule.inputs = {f->queries, f->queries, f->keys, f->keys, f->queries, f->statistics};
  rule.outputs = {f->queries, f->keys, f->keys};
  return rule;
}

struct ChunkedAttentionNode final : FusedNode {
  ChunkedAttentionNode() : FusedNode("chunked_attention", "ChunkedAttentionBackward") {}
  std::vector<std::int64_t> firsts, documents;
  std::int64_t window = 0;

 private:
  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    auto [of_q, of_k, of_v] = ChunkedAttentionBackward::call(
        gradient, saved(0), saved(1), saved(2), saved(3), saved(4), firsts, window, documents);
    return {of_q, of_k, of_v};
  }
};

TwoTensors differentiable_chunked_attention(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, c10::IntArrayRef firsts,
                                            std::int64_t window, c10::IntArrayRef documents) {
  const auto node = node_for<ChunkedAttentionNode>(q, k, v);
  TwoTensors result = ChunkedAttention::call_below_autograd(q, k, v, firsts, window, documents);
  if (node != nullptr) {
    // Not the result itself, which holds the node.
    node->save(q, k, v, std::get<0>(result).detach(), std::get<1>(result));
    node->firsts = firsts.vec();
    node->window = window;
    node->documents = documents.vec();
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
                             c10::IntArrayRef firsts, std::int64_t window,
                             c10::IntArrayRef documents) {
  return std::get<0>(ChunkedAttention::call(q, k, v, firsts, window, documents));
}

}  // namespace tessera::detail

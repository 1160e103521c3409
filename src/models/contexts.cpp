#include "contexts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/models/rope.h"
#include "tessera/nn/attention_kernel.h"

namespace tessera::models {
namespace {

using Angles = std::pair<at::Tensor, at::Tensor>;  // cos and sin, (positions, head_dim)

/// The tables are made once and sliced, except for angles that depend on how long the text is.
Angles angles_of(const ContextParts& parts, std::int64_t first, std::int64_t last) {
  const LlamaConfig& c = parts.config;
  if (c.rope.depends_on_length(last)) {
    return rope_tables(c.rope, c.head_dim, first, last, last, parts.cos.device());
  }
  return {parts.cos.slice(0, first, last), parts.sin.slice(0, first, last)};
}

/// (batch * (last - first), head_dim): text i begins at position padding[i]. Padding, which nobody
/// sees, gets the angles of the text's first token.
Angles angles_of_texts(const ContextParts& parts, const std::vector<std::int64_t>& padding,
                       std::int64_t first, std::int64_t last) {
  std::vector<at::Tensor> cos, sin;
  for (const std::int64_t count : padding) {
    const Angles angles = angles_of(parts, std::max(first - count, std::int64_t{0}), last - count);
    const std::int64_t missing = last - first - angles.first.size(0);
    for (const auto& [table, all] :
         {std::pair(angles.first, &cos), std::pair(angles.second, &sin)}) {
      all->push_back(table.slice(0, 0, 1).expand({missing, -1}));
      all->push_back(table);
    }
  }
  return {at::cat(cos), at::cat(sin)};
}

/// (batch, 1, sequence, sequence): tokens don't see padding. Padding sees itself: attention of
/// nothing at all is not a number.
at::Tensor prompt_mask(const ContextParts& parts, const std::vector<std::int64_t>& padding,
                       std::int64_t sequence) {
  const c10::Device device = parts.cos.device();
  const at::Tensor causal = nn::causal_mask(sequence, parts.config.sliding_window, device);
  const at::Tensor itself = nn::causal_mask(sequence, 1, device);
  const auto integers = at::dtype(c10::kLong).device(device);
  const at::Tensor first = at::tensor(padding, at::dtype(c10::kLong)).to(device);
  const at::Tensor is_token = at::arange(sequence, integers).ge(first.unsqueeze(1));
  return causal.logical_and(is_token.unsqueeze(1)).logical_or(itself).unsqueeze(1);
}

/// The angles are those of the whole sequence, at the positions that this rank has.
Context split_context(const ContextParts& parts, const at::Tensor& tokens) {
  const nn::ContextParallel& split = *parts.context_parallel;
  const auto [cos, sin] = angles_of(parts, 0, tokens.size(1) * split.mesh().size());
  return {{.batch = tokens.size(0),
           .cos = split.shard(cos, 0),
           .sin = split.shard(sin, 0),
           .context_parallel = parts.context_parallel},
          nullptr};
}

}  // namespace

/// The causal mask covers the tokens of this call.
Context context_of(const ContextParts& parts, const at::Tensor& tokens, KvCache* cache) {
  if (parts.context_parallel) {
    return split_context(parts, tokens);
  }
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t sequence = tokens.size(1);
  const bool padded = cache != nullptr && cache->padded();
  TESSERA_CHECK(cache == nullptr || std::ssize(cache->padding()) == tokens.size(0), "tokens of ",
                tokens.size(0), " texts were given to a cache for ", cache->padding().size(),
                "; make the cache for as many");
  const auto [cos, sin] = padded ? angles_of_texts(parts, cache->padding(), past, past + sequence)
                                 : angles_of(parts, past, past + sequence);
  at::Tensor mask;
  if (past > 0) {
    mask = cache->mask(parts.cos.device());
  } else if (padded) {
    mask = prompt_mask(parts, cache->padding(), sequence);
  }
  return {{.batch = tokens.size(0), .cos = cos, .sin = sin, .mask = mask}, cache};
}

namespace {

void check_positions(const ContextParts& parts, const at::Tensor& tokens,
                     const at::Tensor& positions, const KvCache* cache) {
  const LlamaConfig& c = parts.config;
  const nn::ContextParallelPtr& split = parts.context_parallel;
  const std::int64_t ranks = split ? split->mesh().size() : 1;
  TESSERA_CHECK(cache == nullptr && positions.size(0) == tokens.size(0) &&
                    positions.size(1) == tokens.size(1) * ranks,
                "positions of sizes ", positions.sizes(), " were given with tokens of ",
                tokens.sizes(), cache != nullptr ? " and a cache" : "",
                "; give one for each token of the sequences, and no cache");
  const std::int64_t sequence = positions.size(1);
  TESSERA_CHECK(!c.rope.depends_on_length(sequence), "documents in sequences of ", sequence,
                " tokens were given, but the model's dynamic rope scaling turns by the length of "
                "each text beyond ",
                c.rope.scaling.original_positions, " tokens; take shorter sequences");
}

}  // namespace

Context document_context(const ContextParts& parts, const at::Tensor& tokens,
                         const InDocuments& places, const KvCache* cache) {
  const at::Tensor& positions = places.positions;
  check_positions(parts, tokens, positions, cache);
  const nn::ContextParallelPtr& split = parts.context_parallel;
  const at::Tensor rows = (split ? split->shard(positions, 1) : positions).flatten();
  return {{.batch = positions.size(0),
           .cos = parts.cos.index_select(0, rows),
           .sin = parts.sin.index_select(0, rows),
           .context_parallel = split,
           .documents = places.documents != nullptr
                            ? places.documents
                            : std::make_shared<const nn::Documents>(positions, parts.cos.device())},
          nullptr};
}

}  // namespace tessera::models

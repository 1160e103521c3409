// self[indices]: NumPy's advanced indexing.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The factors of self[indices]. The indices broadcast together. Their dimensions replace the
/// indexed ones: in place where those are adjacent, else in front.
struct AdvancedIndex {
  std::vector<int> indices;   ///< tensors, None left out
  std::vector<bool> indexed;  ///< for each of self's dimensions
  TensorFactors broadcast;    ///< factors of the indices, broadcast
  TensorFactors result;       ///< factors of self[indices]
};

/// Whether masks may be among the indices: how much they select is known only from the data.
enum class Masks { kRefused, kTaken };

/// How many dimensions of self each index takes: one, or as many as a mask has. nullopt where these
/// are too many, for masks that are refused, and for masks beside indices of several dimensions. An
/// itemsize of 1 means a mask: bool and uint8 both mask in libtorch. Core knows no other type that
/// may index with one byte; int8 is refused by libtorch itself.
std::optional<std::vector<int>> index_widths(const OpCall& call, const std::vector<TensorRef>& refs,
                                             Masks masks) {
  std::vector<int> widths;
  int total = 0;
  bool masked = false, tables = false;
  for (const TensorRef ref : refs) {
    const bool mask = ref.index >= 0 && meta_of(call, ref.index).itemsize == 1;
    masked = masked || mask;
    tables = tables || (ref.index >= 0 && !mask && meta_of(call, ref.index).ndim() > 1);
    widths.push_back(mask ? meta_of(call, ref.index).ndim() : 1);
    total += widths.back();
  }
  if (masked && (tables || masks == Masks::kRefused)) {
    return std::nullopt;
  }
  if (total > call.tensor(0).ndim()) {
    return std::nullopt;
  }
  return widths;
}

/// What masks broadcast to: one dimension of unknown size. Masks get no factors: they are
/// replicated.
TensorFactors masked_broadcast(ShardingRule& rule) {
  return {{add_unsharded(rule, ShardingRule::kUnknown)}};
}

/// Dimensions that are indexed stay unsharded: any position of them may be asked for.
std::optional<AdvancedIndex> add_index(ShardingRule& rule, const OpCall& call,
                                       Masks masks = Masks::kRefused) {
  const int self = call.tensor_index(0);
  const std::vector<TensorRef> refs = call.tensor_list(1);
  const TensorFactors own = add_factors(rule, meta_of(call, self).sizes);
  const std::optional<std::vector<int>> widths = index_widths(call, refs, masks);
  if (!widths) {
    return std::nullopt;
  }
  AdvancedIndex index;
  index.indexed.resize(own.size());
  std::size_t dim = 0;
  bool masked = false;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const auto end = dim + static_cast<std::size_t>((*widths)[i]);
    // None is a colon: the dimension is taken as a whole, and stays sharded.
    if (refs[i].index < 0) {
      dim = end;
      continue;
    }
    masked = masked || meta_of(call, refs[i].index).itemsize == 1;
    index.indices.push_back(refs[i].index);
    for (; dim < end; ++dim) {
      index.indexed[dim] = true;
      keep_unsharded(rule, own[dim]);
    }
  }
  std::optional<TensorFactors> broadcast =
      masked ? masked_broadcast(rule) : add_broadcast(rule, call, index.indices);
  if (!broadcast || index.indices.empty()) {
    return std::nullopt;
  }
  index.broadcast = *std::move(broadcast);
  input_of(rule, self) = own;

  // NumPy puts the indices' dimensions where the indexed ones were if these are neighbours, and in
  // front otherwise.
  const auto first = std::find(index.indexed.begin(), index.indexed.end(), true);
  const auto last = std::find(index.indexed.rbegin(), index.indexed.rend(), true).base();
  const bool adjacent = std::all_of(first, last, [](bool indexed) { return indexed; });
  const auto position = adjacent ? first - index.indexed.begin() : 0;
  for (std::size_t dim = 0; dim < own.size(); ++dim) {
    if (!index.indexed[dim]) {
      index.result.push_back(own[dim]);
    }
  }
  index.result.insert(index.result.begin() + position, index.broadcast.begin(),
                      index.broadcast.end());
  return index;
}

/// The values move and do not change: any pending reduction may wait.
std::optional<ShardingRule> index_rule(const OpCall& call) {
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call);
  if (!index) {
    return std::nullopt;
  }
  rule.outputs.push_back(index->result);
  add_any_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// index_put(self, indices, values, accumulate): values broadcast to self[indices].
std::optional<ShardingRule> index_put_rule(const OpCall& call) {
  const int self = call.tensor_index(0), values = call.tensor_index(2);
  const bool add = call.boolean_or(3, false);
  ShardingRule rule = start(call);
  const std::optional<AdvancedIndex> index = add_index(rule, call, Masks::kTaken);
  if (!index) {
    return std::nullopt;
  }
  const Sizes& sizes = meta_of(call, values).sizes;
  if (sizes.size() > index->result.size()) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Factors& factors = index->result[index->result.size() - sizes.size() + i];
    if (sizes[i] == size_of(rule, factors)) {
      input_of(rule, values)[i] = factors;
    }
  }
  for (const Factors& factors : index->broadcast) {
    for (int factor : factors) {
      if (add) {
        rule.factors[static_cast<std::size_t>(factor)].reduction = ReduceOp::kSum;
      }
    }
  }
  rule.outputs.push_back(input_of(rule, self));
  // With accumulation self counts once among the terms. Without it the last write wins, which
  // shards of the indices could not agree on: their factors have no reduction.
  if (add) {
    rule.additive.push_back(self);
    add_linear(rule, {self, values});
  } else {
    add_any_linear(rule, {self, values});
  }
  return rule;
}

}  // namespace

std::vector<Row> advanced_indexing_rows() {
  return {
      {"index.Tensor _unsafe_index.Tensor", index_rule},
      {"index_put{,_} _unsafe_index_put _index_put_impl_", index_put_rule},
  };
}

}  // namespace tessera::rules

#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

/// Helpers to write sharding rules, the library's own and a program's (register_rule.h). They make
/// rules short, as common parts (factors, broadcasting, linearity) are here. Pure.
TESSERA_API_BEGIN
namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;            ///< of a tensor
using Factors = ShardingRule::Factors;              ///< of a dimension: indices of factors
using TensorFactors = ShardingRule::TensorFactors;  ///< of a tensor: one entry a dimension

// Indices are those of OpCall::tensors and of ShardingRule::factors.

/// A rule for `call` in which no dimension has a factor yet: everything is replicated.
ShardingRule start(const OpCall& call);

/// A new factor that may be sharded. Returns its index.
int add_factor(ShardingRule& rule, std::int64_t size);
/// One that must not be.
int add_unsharded(ShardingRule& rule, std::int64_t size);
/// One that makes the outputs that lack it Partial(op).
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// One new factor per size.
TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes);
/// One per size that must not be sharded.
TensorFactors add_unsharded_factors(ShardingRule& rule, const Sizes& sizes);
/// The product of the factors' sizes; with a kUnknown among them negative: unknown.
std::int64_t size_of(const ShardingRule& rule, const Factors& factors);

/// Forbids to shard any factor of a dimension.
void keep_unsharded(ShardingRule& rule, const Factors& factors);

/// Forbids empty shards of all factors that the rule has so far.
void forbid_empty_shards(ShardingRule& rule);
/// A group of all input tensors of the call with some of the outputs; the others are replicated.
ShardingRule::TensorGroup group_of_inputs(const OpCall& call, std::vector<int> outputs);

/// Says that the operator is linear in `inputs` together: Partial sums and averages stay partial.
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Likewise for the given reductions.
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// Likewise for every reduction: the operator moves elements and does not change them.
void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs);
/// The same in short, for tables of operators: terms separated by blanks. A term names the tensors
/// that are partial together, by their position in `tensors`, and for which reductions:
///   "01"   sum and avg: linear in tensors 0 and 1 together
///   "0<"   max and min: monotone, not decreasing
///   "01^"  max;  "01v"  min
///   "0~"   avg: affine
///   "12*"  every reduction: elements are selected, not changed
void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors);

/// A dimension as an index from 0. Throws Error if it is out of range (0-d tensors have one).
int wrap_dim(const OpCall& call, std::int64_t dim, int ndim);
/// Which of `ndim` dimensions list argument `arg` names; all of them if it is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Gives `tensors` the factors of an operator that broadcasts them, and returns those of the
/// result, one per dimension. nullopt if their sizes don't broadcast.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);
/// The tensors among the arguments, without those in lists, in order.
std::vector<int> tensor_arguments(const OpCall& call);

/// The factors of a tensor of the call, to be written.
inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}
/// The sizes of a tensor of the call.
inline const TensorMeta& meta_of(const OpCall& call, int tensor) {
  return call.tensors[static_cast<std::size_t>(tensor)];
}

}  // namespace tessera::rules
TESSERA_API_END

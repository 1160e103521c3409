#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

/// Helpers for writing sharding rules, in the library and in programs (register_rule.h): common
/// parts of rules such as factors, broadcasting and linearity. Pure.
TESSERA_API_BEGIN
namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;  ///< the sizes of a tensor
using Factors = ShardingRule::Factors;    ///< the factors of a dimension, as indices
/// the factors of a tensor, one entry for each dimension
using TensorFactors = ShardingRule::TensorFactors;

// Tensor indices below refer to OpCall::tensors, factor indices to ShardingRule::factors.

/// A rule for `call` in which no dimension has a factor yet, so that everything is replicated.
ShardingRule start(const OpCall& call);

/// Adds a factor that may be sharded. Returns its index.
int add_factor(ShardingRule& rule, std::int64_t size);
/// Adds a factor that must not be sharded. Returns its index.
int add_unsharded(ShardingRule& rule, std::int64_t size);
/// Adds a factor that, if sharded, makes outputs without it Partial(op). Returns its index.
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// Adds one factor for each size.
TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes);
/// Adds one factor for each size; these factors must not be sharded.
TensorFactors add_unsharded_factors(ShardingRule& rule, const Sizes& sizes);
/// The product of the factors' sizes; negative (unknown) if one of them is kUnknown.
std::int64_t size_of(const ShardingRule& rule, const Factors& factors);

/// Forbids sharding of all factors of a dimension.
void keep_unsharded(ShardingRule& rule, const Factors& factors);

/// Forbids empty shards of all factors that the rule has so far.
void forbid_empty_shards(ShardingRule& rule);
/// A tensor group of all input tensors of the call and the given outputs; the other outputs are
/// replicated.
ShardingRule::TensorGroup group_of_inputs(const OpCall& call, std::vector<int> outputs);

/// Declares that the operator is linear in `inputs` together: Partial sums and averages stay
/// partial.
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Declares that the operator commutes with the given reductions of `inputs` together.
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// Declares that the operator commutes with every reduction of `inputs`: it moves elements without
/// changing them.
void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs);
/// Declares linearity in a short notation for tables of operators: terms separated by blanks. A
/// term names tensors that may be partial together, by their position in `tensors`, and the
/// reductions:
///   "01"   sum and avg: linear in tensors 0 and 1 together
///   "0<"   max and min: monotone, not decreasing
///   "01^"  max;  "01v"  min
///   "0~"   avg: affine
///   "12*"  every reduction: elements are selected, not changed
void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors);

/// A dimension as an index from 0. Throws Error if it is out of range (a 0-d tensor counts as
/// having one dimension).
int wrap_dim(const OpCall& call, std::int64_t dim, int ndim);
/// Which of `ndim` dimensions the list argument `arg` names; all of them if it is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Gives `tensors` the factors of an operator that broadcasts them. Returns the factors of the
/// result, one entry for each dimension; nullopt if the sizes cannot be broadcast.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);
/// The indices of the tensor arguments, in order, without tensors in lists.
std::vector<int> tensor_arguments(const OpCall& call);

/// The factors of a tensor of the call, for writing.
inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}
/// The sizes of a tensor of the call.
inline const TensorMeta& meta_of(const OpCall& call, int tensor) {
  return call.tensors[static_cast<std::size_t>(tensor)];
}

}  // namespace tessera::rules
TESSERA_API_END

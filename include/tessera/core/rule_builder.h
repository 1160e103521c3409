#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

/// Functions for writing sharding rules (register_rule.h). The functions add factors, broadcasting
/// and linearity to a rule. Pure.
TESSERA_API_BEGIN
namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;  ///< the sizes of a tensor, one for each dimension
using Factors = ShardingRule::Factors;    ///< the factors of a dimension, as indices
/// the factors of a tensor, one entry for each dimension
using TensorFactors = ShardingRule::TensorFactors;

// In this header, tensor indices refer to OpCall::tensors, and factor indices refer to
// ShardingRule::factors.

/// A sharding rule for `call` in which no dimension has a factor. The rule replicates all tensors
/// until factors are added.
ShardingRule start(const OpCall& call);

/// Adds a factor that may be sharded. Returns its index.
int add_factor(ShardingRule& rule, std::int64_t size);
/// Adds a factor that must not be sharded. Returns its index.
int add_unsharded(ShardingRule& rule, std::int64_t size);
/// Adds a factor of `size` positions. If the factor is sharded, outputs without the factor become
/// Partial(op). Returns the factor's index.
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// Adds a factor for each of `sizes`; these factors may be sharded. Returns the factors of a tensor
/// with `sizes`, one factor for each dimension.
TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes);

/// Forbids sharding of all factors of a dimension.
void keep_unsharded(ShardingRule& rule, const Factors& factors);

/// Forbids empty shards of all factors that the rule has so far.
void forbid_empty_shards(ShardingRule& rule);

/// Declares that the operator is linear in `inputs` together: if all of them are Partial sums or
/// averages, the outputs are too.
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Declares that the operator commutes with the given reductions of `inputs` together.
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// Declares linearity in a short notation for tables of operators: terms separated by blanks. A
/// term has the positions in `tensors` of the tensors that may be partial together, and a character
/// for the reductions:
///   "01"   sum and avg: linear in tensors 0 and 1 together
///   "0<"   max and min: monotone, not decreasing
///   "01^"  max;  "01v"  min
///   "0~"   avg: affine
///   "12*"  every reduction: elements are selected, not changed
void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors);

/// For each of `ndim` dimensions, whether the list argument `arg` names the dimension. All true if
/// the argument is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Gives `tensors` the factors of an operator that broadcasts them. Returns the factors of the
/// result, one entry for each dimension; nullopt if the sizes cannot be broadcast.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);

/// The factors of tensor number `tensor` of the call, as a reference that the caller may write to.
inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}

}  // namespace tessera::rules
TESSERA_API_END

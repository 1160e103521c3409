#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;
using Factors = ShardingRule::Factors;
using TensorFactors = ShardingRule::TensorFactors;

/// A rule for `call` in which no dimension has a factor yet: everything is replicated.
ShardingRule start(const OpCall& call);

int add_factor(ShardingRule& rule, std::int64_t size);
int add_whole(ShardingRule& rule, std::int64_t size);
int add_reduced(ShardingRule& rule, std::int64_t size, ReduceOp op);
/// One new factor, or whole factor, per size.
TensorFactors add_factors(ShardingRule& rule, const Sizes& sizes);
TensorFactors add_wholes(ShardingRule& rule, const Sizes& sizes);
std::int64_t size_of(const ShardingRule& rule, const Factors& factors);

/// Marks every factor of a dimension as one that must stay whole.
void keep_whole(ShardingRule& rule, const Factors& factors);

/// The rule is linear in these inputs together: for sums and averages.
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Likewise for the given reductions.
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// For every reduction: the operator moves elements, it does not change them.
void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs);

/// A dimension as an index from 0. Throws Error if it is out of range (0-d tensors have one).
int wrap_dim(const OpCall& call, std::int64_t dim, int ndim);
/// Which of `ndim` dimensions the list argument `arg` names; all of them if it is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Factors of the sizes to which the tensors broadcast, one per result dimension; sets each
/// input's. nullopt if the sizes don't broadcast. `tensors` are indices in OpCall::tensors.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);
/// The tensors among the arguments, lists left out, in order.
std::vector<int> tensor_arguments(const OpCall& call);

inline TensorFactors& input_of(ShardingRule& rule, int tensor) {
  return rule.inputs[static_cast<std::size_t>(tensor)];
}
inline const TensorMeta& meta_of(const OpCall& call, int tensor) {
  return call.tensors[static_cast<std::size_t>(tensor)];
}

/// "aten::add_.Tensor" is "add_"; whether it ends in an underscore.
std::string_view base_name(std::string_view op);
bool is_inplace(std::string_view op);
/// How many of an overload's last arguments take its results: one of "aten::add.out", two of
/// "aten::sort.values".
std::size_t out_count(std::string_view op);

}  // namespace tessera::rules

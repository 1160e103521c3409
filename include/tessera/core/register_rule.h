// Functions by which a program registers sharding rules for its operators.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Gives operator `op` a sharding rule, or replaces the library's rule. `op` is the operator's full
/// name: "mylib::scale", "mylib::scale.out". In-place and out= variants are registered under their
/// own names, with the rule of the functional operator. `rule` returns nullopt for a call that the
/// rule does not cover. `reads_numbers`: whether the rule depends on the values of float and Scalar
/// arguments. Every process of a job must register the same rules. Not collective. Thread safe.
/// Throws Error after the operator's first use on a distributed tensor, and for a second rule of
/// one operator. The first call of any operator throws Error if a registered `op` does not exist,
/// or if libtorch composes it of other operators (CompositeImplicitAutograd), because its rule
/// would never be used.
///
///   // An elementwise operator: each dimension is one factor, which the output shares.
///   register_rule("mylib::scale", [](const OpCall& call) -> std::optional<ShardingRule> {
///     ShardingRule rule;
///     ShardingRule::TensorFactors dims;
///     for (const std::int64_t size : call.tensor(0).sizes) {
///       dims.push_back({static_cast<int>(rule.factors.size())});
///       rule.factors.push_back({.size = size});
///     }
///     rule.inputs = {dims};
///     rule.outputs = {dims};
///     rule.linear = {{.partial_inputs = {0}, .op = ReduceOp::kSum}};
///     return rule;
///   });
void register_rule(std::string op, std::function<std::optional<ShardingRule>(const OpCall&)> rule,
                   bool reads_numbers = false);

/// Placements with which an operator can run on one mesh dimension: those of the tensor arguments,
/// in the order of the schema with lists flattened, and those of the results. Either some inputs
/// are Shard and every result is Shard or Partial, or some inputs are Partial and every result is
/// Partial. Negative dimensions count from the end.
struct AcceptedPlacements {
  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
};

/// Registers a rule as a list of placements. On each mesh dimension, inputs are redistributed to
/// the placements of one entry of `accepted`, or all are replicated. `results` returns the global
/// sizes of each result of a call; by default there is one result, with the sizes of the first
/// tensor. If entries shard one dimension inconsistently, or with several reductions, calling the
/// operator throws Error; write a ShardingRule instead. PyTorch's register_sharding.
///
///   // A matrix product: rows of a, columns of b, or the dimension that is summed over.
///   register_rule("mylib::product",
///                 std::vector<AcceptedPlacements>{
///                     {.inputs = {Shard{0}, Replicate{}}, .outputs = {Shard{0}}},
///                     {.inputs = {Replicate{}, Shard{1}}, .outputs = {Shard{1}}},
///                     {.inputs = {Shard{1}, Shard{0}}, .outputs = {Partial{}}}},
///                 [](const OpCall& call) {
///                   return std::vector<std::vector<std::int64_t>>{
///                       {call.tensor(0).size(0), call.tensor(1).size(1)}};
///                 });
void register_rule(
    std::string op, std::vector<AcceptedPlacements> accepted,
    std::function<std::vector<std::vector<std::int64_t>>(const OpCall&)> results = nullptr);

}  // namespace tessera
TESSERA_API_END

// Functions and types that the tables of sharding rules share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/rule_functions.h"
#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

/// Returns a name without namespace and overload: "add_" for "aten::add_.Tensor".
std::string_view base_name(std::string_view op);
/// Whether the operator's base name ends in one underscore, as names of in-place operators do.
bool is_inplace(std::string_view op);
/// Returns how many of the last arguments receive the results: 1 for "aten::add.out", 2 for
/// "aten::sort.values", 0 for an overload that is not an out= variant.
std::size_t out_count(std::string_view op);

/// Returns the product of the sizes of einsum index letters; negative if a size is kUnknown.
std::int64_t size_of(const ShardingRule& rule, const Factors& factors);

/// Returns a TensorGroup (tensors whose layouts are chosen together) of all input tensors of the
/// call and the given outputs. An output that is in no TensorGroup is replicated.
ShardingRule::TensorGroup group_of_inputs(const OpCall& call, std::vector<int> outputs);

/// Declares that the operator is jointly linear in the tensors `inputs`: if all `inputs` are
/// Partial sums (or averages), every output is a Partial sum (or average).
void add_linear(ShardingRule& rule, std::vector<int> inputs);
/// Declares for each of `ops`: if all `inputs` are Partial(op), the outputs are Partial(op).
void add_linear(ShardingRule& rule, const std::vector<int>& inputs,
                std::initializer_list<ReduceOp> ops);
/// Calls add_linear() for each of `terms`, which are separated by blanks. In "01~", the digits are
/// positions in `tensors`: Partial inputs that give Partial outputs. '~' gives the reductions:
///   none  sum, avg (jointly linear)      '~'  avg (affine)     '^'  max      'v'  min
///   '<'   max, min (not decreasing)      '*'  all (elements are selected, not changed)
void add_linear_terms(ShardingRule& rule, std::string_view terms, const std::vector<int>& tensors);

/// Returns, for each of `ndim` dimensions, whether argument `arg` lists the dimension. Every
/// element is true if the argument is None or empty.
std::vector<bool> named_dims(const OpCall& call, std::size_t arg, int ndim);

/// Gives `tensors` one factor (einsum index letter) for each broadcast dimension, and returns the
/// result's factors. Returns nullopt if the sizes cannot be broadcast.
std::optional<TensorFactors> add_broadcast(ShardingRule& rule, const OpCall& call,
                                           const std::vector<int>& tensors);

/// Declares that the operator commutes with every reduction of the tensors `inputs`, as operators
/// do that move elements without changing them.
void add_any_linear(ShardingRule& rule, const std::vector<int>& inputs);

/// Returns `dim` as an index from 0. Throws Error if `dim` is out of range; a 0-d tensor counts as
/// having one dimension.
int wrap_dim(const OpCall& call, std::int64_t dim, int ndim);

/// Returns the indices in `OpCall::tensors` of the Tensor arguments, but not of tensors in lists.
std::vector<int> tensor_arguments(const OpCall& call);

inline const TensorMeta& meta_of(const OpCall& call, int tensor) {
  return call.tensors[static_cast<std::size_t>(tensor)];
}

/// Sets the factors (index letters) of tensor argument `arg`. Does nothing if `arg` is None.
void set_input(ShardingRule& rule, const OpCall& call, std::size_t arg,
               const TensorFactors& factors);

/// A sharding rule under construction, for an operator that reads one tensor, argument 0.
struct UnaryRule {
  ShardingRule rule;
  TensorFactors input;  ///< factors (index letters) of the tensor; at first one for each dimension

  explicit UnaryRule(const OpCall& call)
      : rule(start(call)),
        input(add_factors(rule, call.tensor(0).sizes)),
        self_(call.tensor_index(0)) {}

  /// Completes the rule of an operator that moves elements without changing them: a Partial input
  /// gives a Partial result, for every reduction.
  ShardingRule moved(TensorFactors output) && {
    add_any_linear(rule, {self_});
    return std::move(*this).finish(std::move(output));
  }
  /// Completes the rule of a linear operator: a Partial sum or average gives a Partial result.
  ShardingRule linear(TensorFactors output) && {
    add_linear(rule, {self_});
    return std::move(*this).finish(std::move(output));
  }
  /// Completes the rule of an operator for which no Partial input gives a Partial result.
  ShardingRule finish(TensorFactors output) && {
    input_of(rule, self_) = std::move(input);
    rule.outputs = {std::move(output)};
    return std::move(rule);
  }

 private:
  int self_;
};

/// Returns the rule of an operator whose result has the sizes and the layout of argument 0.
ShardingRule unchanged(const OpCall& call);
/// Returns the factors (index letters) of a slice of a tensor with the factors `whole`; `dim` is
/// unsharded. `size`: the slice's size along `dim`; nullopt if the slice lacks `dim`.
TensorFactors part_along(ShardingRule& rule, const TensorFactors& whole, std::size_t dim,
                         std::optional<std::int64_t> size);
/// Returns the factors (einsum index letters) of a tensor of `sizes` that broadcasts to a tensor
/// with the factors `to`. Broadcast dimensions get no factor.
TensorFactors factors_of_broadcast(const ShardingRule& rule, const Sizes& sizes,
                                   const TensorFactors& to);

// The tables of sharding rules. A new table is declared here and listed in
// src/core/propagate/rule_registry.cpp.

/// The sharding rule of the operators in `names`, which are separated by blanks, without "aten::",
/// and with braces as in a shell ("add{,_}.Tensor add.out"). `body` describes the functional
/// variant; rule_registry.cpp adapts `body` to in-place operators and out= overloads.
struct Row {
  std::string_view names;
  RuleFunction::Body body;
  bool reads_numbers = false;  ///< whether the rule reads float and Scalar arguments
};

/// The sharding rules of a family of similar operators.
struct Table {
  std::string_view family;
  std::vector<Row> rows;
};

Table attention_table();
Table convolution_table();
Table creation_table();
Table embedding_table();
Table indexing_table();
Table joining_table();
Table loss_table();
Table matmul_table();
Table normalisation_table();
Table pointwise_table();
Table random_table();
Table reduction_table();
Table scan_table();
Table view_gradient_table();
Table view_table();

}  // namespace tessera::rules

// The fused operators tessera::embedding and tessera::fp8_linear.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/detail/fused.h"

namespace tessera::detail {

// Embedding. The table can be sharded by rows (vocabulary parallel) or by columns. If the table is
// sharded by rows, each rank returns zeros for rows of other ranks: the result is Partial.

namespace {

/// The embedding operator. `total_rows`: the number of rows of the table over all ranks. `weight`
/// has the rows from `first_row` on, or all rows if `total_rows` is negative.
struct Embedding : FusedOperator<Embedding, at::Tensor(const at::Tensor&, const at::Tensor&,
                                                       std::int64_t, std::int64_t)> {
  static constexpr const char* name = "tessera::embedding";
  static constexpr const char* signature =
      "(Tensor weight, Tensor indices, int first_row=0, int total_rows=-1) -> Tensor";
};

/// The operator that computes the gradient of `weight`. It reads the sizes and the layout of
/// `weight`, but not the values.
struct EmbeddingBackward
    : FusedOperator<EmbeddingBackward, at::Tensor(const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, std::int64_t)> {
  static constexpr const char* name = "tessera::embedding_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor indices, Tensor weight, int first_row=0) -> Tensor";
};

at::Tensor run_embedding(const at::Tensor& weight, const at::Tensor& indices,
                         std::int64_t first_row, std::int64_t total_rows) {
  TESSERA_CHECK(weight.dim() == 2, "embedding: the table has sizes ", weight.sizes(),
                "; it must have two dimensions");
  TESSERA_CHECK(indices.scalar_type() == c10::ScalarType::Long,
                "embedding: the indices are of type ", indices.scalar_type(),
                "; they must be int64");
  return kernels::embedding_rows(weight, indices, first_row,
                                 total_rows < 0 ? weight.size(0) : total_rows);
}

at::Tensor run_embedding_backward(const at::Tensor& grad, const at::Tensor& indices,
                                  const at::Tensor& weight, std::int64_t first_row) {
  return kernels::embedding_rows_backward(grad, indices, first_row, weight.size(0));
}

/// Index letters (as in einsum) of the dimensions in the sharding rule of embedding: of the
/// indices, of the result (one row per index), and of the table.
struct EmbeddingFactors {
  rules::TensorFactors indices, result, table;
  int row = -1;

  EmbeddingFactors(ShardingRule& rule, const TensorMeta& of_table, const TensorMeta& of_indices,
                   bool reduces_rows) {
    for (const std::int64_t size : of_indices.sizes) {
      // The gradient of the embedding table is a sum over the indices, so each shard of the indices
      // computes one term of this sum.
      indices.push_back({rules::add_reduced(rule, size, ReduceOp::kSum)});
    }
    row = reduces_rows ? rules::add_reduced(rule, of_table.size(0), ReduceOp::kSum)
                       : rules::add_factor(rule, of_table.size(0));
    // A rank's rows of the table must be consecutive: `first_row` and a count describe the rows.
    rule.factors.back().contiguous = true;
    table = {{row}, {rules::add_factor(rule, of_table.size(1))}};
    result = indices;
    result.push_back(table.back());
  }
};

std::optional<ShardingRule> embedding_rule(const OpCall& call) {
  if (call.tensor(0).ndim() != 2 || call.integer(3) >= 0) {
    return std::nullopt;
  }
  ShardingRule rule = rules::start(call);
  const EmbeddingFactors factors(rule, call.tensor(0), call.tensor(1), /*reduces_rows=*/true);
  rules::input_of(rule, 0) = factors.table;
  rules::input_of(rule, 1) = factors.indices;
  rule.outputs = {factors.result};
  rule.local_call = {.op = Embedding::name,
                     .args = {TensorRef{0}, TensorRef{1}, std::int64_t{0}, call.tensor(0).size(0)},
                     .when_split = {factors.row}};
  rule.offset_arguments = {{.arg = 2, .input = 0, .dim = 0}};
  return rule;
}

/// The sharding rule of embedding's gradient, which is sharded like the embedding table. Only the
/// layout of the table is used, not its values.
std::optional<ShardingRule> embedding_backward_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const EmbeddingFactors factors(rule, call.tensor(2), call.tensor(1), /*reduces_rows=*/false);
  rules::input_of(rule, 0) = factors.result;
  rules::input_of(rule, 1) = factors.indices;
  rules::input_of(rule, 2) = factors.table;
  rule.unread = {2};
  rule.outputs = {factors.table};
  rule.local_call = {.op = EmbeddingBackward::name,
                     .args = {TensorRef{0}, TensorRef{1}, TensorRef{2}, std::int64_t{0}},
                     .when_split = {factors.row}};
  rule.offset_arguments = {{.arg = 3, .input = 2, .dim = 0}};
  return rule;
}

at::Tensor differentiable_embedding(const at::Tensor& weight, const at::Tensor& indices,
                                    std::int64_t first_row, std::int64_t total_rows) {
  const auto backward = [first_row](FusedNode& node, const variable_list& gradients) {
    return variable_list{
        EmbeddingBackward::call(gradients[0], node.saved(0), node.saved(1), first_row)};
  };
  const auto node = formula_node("embedding", "EmbeddingBackward", backward, weight);
  if (node != nullptr) {
    // Saves the weight by variable_data(), which has its own version counter, so that a change of
    // the embedding table before backward is permitted.
    node->save(indices, weight.variable_data());
  }
  return recorded(node, Embedding::call_below_autograd(weight, indices, first_row, total_rows));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<Embedding>(library, &run_embedding, embedding_rule, &differentiable_embedding);
  define<EmbeddingBackward>(library, &run_embedding_backward, embedding_backward_rule);
}

}  // namespace

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  return Embedding::call(weight, indices, /*first_row=*/0, /*total_rows=*/-1);
}

// The fp8 matrix product of a linear layer. Each rank computes the scale of a sharded row from its
// shard. Scales are powers of two, so only subnormal elements can be rounded differently. Partial
// inputs are reduced first.

namespace {

using ProductOfTwo = at::Tensor(const at::Tensor&, const at::Tensor&);

struct Fp8Linear : FusedOperator<Fp8Linear, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear";
  static constexpr const char* signature = "(Tensor x, Tensor weight) -> Tensor";
};

struct Fp8LinearInputGrad : FusedOperator<Fp8LinearInputGrad, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear_input_grad";
  static constexpr const char* signature = "(Tensor grad, Tensor weight) -> Tensor";
};

struct Fp8LinearWeightGrad : FusedOperator<Fp8LinearWeightGrad, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear_weight_grad";
  static constexpr const char* signature = "(Tensor grad, Tensor x) -> Tensor";
};

void check_sizes(c10::IntArrayRef x, c10::IntArrayRef weight) {
  TESSERA_CHECK(!x.empty() && weight.size() == 2 && x.back() == weight.back(),
                "fp8_linear: the input has sizes ", x, " and the weight has sizes ", weight,
                "; pass (..., in) and (out, in)");
}

at::Tensor run_fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  check_sizes(x.sizes(), weight.sizes());
  TESSERA_CHECK(x.scalar_type() == weight.scalar_type(), "fp8_linear: the input has type ",
                x.scalar_type(), " and the weight ", weight.scalar_type(), "; pass equal types");
  return kernels::fp8_linear(x, weight);
}

rules::TensorFactors row_factors(ShardingRule& rule, const rules::Sizes& sizes, bool reduced) {
  rules::TensorFactors factors;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    factors.push_back({reduced ? rules::add_reduced(rule, sizes[i], ReduceOp::kSum)
                               : rules::add_factor(rule, sizes[i])});
  }
  return factors;
}

rules::TensorFactors with(rules::TensorFactors rows, int last) {
  rows.push_back({last});
  return rows;
}

/// The sharding rule of an fp8 matrix product of rows and the weight. `summed`: the dimension of
/// the weight that the matrix product sums over.
ShardingRule product_rule(const OpCall& call, std::size_t summed) {
  const rules::Sizes& weight = call.tensor(1).sizes;
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors rows = row_factors(rule, call.tensor(0).sizes, /*reduced=*/false);
  rules::TensorFactors of_weight(2);
  of_weight[summed] = {rules::add_reduced(rule, weight[summed], ReduceOp::kSum)};
  of_weight[1 - summed] = {rules::add_factor(rule, weight[1 - summed])};
  rule.inputs = {with(rows, of_weight[summed].front()), of_weight};
  rule.outputs = {with(rows, of_weight[1 - summed].front())};
  return rule;
}

std::optional<ShardingRule> fp8_linear_rule(const OpCall& call) {
  check_sizes(call.tensor(0).sizes, call.tensor(1).sizes);
  return product_rule(call, 1);
}

std::optional<ShardingRule> input_grad_rule(const OpCall& call) {
  return product_rule(call, 0);
}

std::optional<ShardingRule> weight_grad_rule(const OpCall& call) {
  const rules::Sizes& grad = call.tensor(0).sizes;
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors rows = row_factors(rule, grad, /*reduced=*/true);
  const int out = rules::add_factor(rule, grad.back());
  const int in = rules::add_factor(rule, call.tensor(1).sizes.back());
  rule.inputs = {with(rows, out), with(rows, in)};
  rule.outputs = {{{out}, {in}}};
  return rule;
}

at::Tensor differentiable_fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  const auto backward = [](FusedNode& node, const variable_list& gradients) {
    return variable_list{
        node.task_should_compute_output(0) ? Fp8LinearInputGrad::call(gradients[0], node.saved(1))
                                           : at::Tensor(),
        node.task_should_compute_output(1) ? Fp8LinearWeightGrad::call(gradients[0], node.saved(0))
                                           : at::Tensor()};
  };
  const auto node = formula_node("fp8_linear", "Fp8LinearBackward", backward, x, weight);
  if (node != nullptr) {
    // Does not save fp8 copies: backward needs scales of x along another dimension, and FSDP
    // gathers the weight again in backward.
    node->save(x, weight);
  }
  return recorded(node, Fp8Linear::call_below_autograd(x, weight));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<Fp8Linear>(library, &run_fp8_linear, fp8_linear_rule, &differentiable_fp8_linear);
  define<Fp8LinearInputGrad>(library, &kernels::fp8_linear_input_grad, input_grad_rule);
  define<Fp8LinearWeightGrad>(library, &kernels::fp8_linear_weight_grad, weight_grad_rule);
}

}  // namespace

at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  return Fp8Linear::call(x, weight);
}

at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight) {
  return Fp8LinearInputGrad::call(grad, weight);
}

at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x) {
  return Fp8LinearWeightGrad::call(grad, x);
}

}  // namespace tessera::detail

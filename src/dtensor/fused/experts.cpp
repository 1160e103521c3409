// The operators of a mixture of experts: tessera::all_to_all_uneven, tessera::permute_rows,
// tessera::grouped_linear and tessera::grouped_weight_grad.

#include <ATen/ATen.h>

#include <numeric>
#include <vector>

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/experts.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/kernels/detail/fake_state.h"

namespace tessera::detail {

namespace {

using Counts = c10::IntArrayRef;

std::int64_t sum_of(Counts counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// The operator that exchanges rows between ranks. The argument `group` is the communicator's
// address as an integer, because an operator schema has no type for a process group.

struct AllToAllUneven
    : FusedOperator<AllToAllUneven, at::Tensor(const at::Tensor&, Counts, Counts, std::int64_t)> {
  static constexpr const char* name = "tessera::all_to_all_uneven";
  static constexpr const char* signature =
      "(Tensor x, int[] output_counts, int[] input_counts, int group) -> Tensor";
};

std::vector<std::int64_t> elements_of(Counts rows, std::int64_t row) {
  std::vector<std::int64_t> elements(rows.begin(), rows.end());
  for (std::int64_t& count : elements) {
    count *= row;
  }
  return elements;
}

void check_exchange(const at::Tensor& x, Counts output_counts, Counts input_counts,
                    const comm::Communicator& group) {
  const auto size = static_cast<std::size_t>(group.size());
  TESSERA_CHECK(x.dim() >= 1, "all_to_all_uneven: x has no dimensions; pass a tensor of rows");
  TESSERA_CHECK(input_counts.size() == size && output_counts.size() == size,
                "all_to_all_uneven: ", input_counts.size(), " input and ", output_counts.size(),
                " output counts for a group of ", size, " ranks; pass one count for each rank");
  TESSERA_CHECK(sum_of(input_counts) == x.size(0), "all_to_all_uneven: the input counts sum to ",
                sum_of(input_counts), ", but x has ", x.size(0), " rows; count every row once");
}

at::Tensor run_all_to_all_uneven(const at::Tensor& x, Counts output_counts, Counts input_counts,
                                 std::int64_t address) {
  auto& group = *reinterpret_cast<comm::Communicator*>(address);
  check_exchange(x, output_counts, input_counts, group);
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[0] = sum_of(output_counts);
  const std::int64_t row = c10::multiply_integers(x.sizes().slice(1));
  const std::int64_t reals = x.is_complex() ? 2 : 1;
  const at::Tensor input = x.contiguous(), output = at::empty(sizes, x.options());
  const auto flat = [](const at::Tensor& rows) {
    return (rows.is_complex() ? at::view_as_real(rows) : rows).view({-1});
  };
  if (!x.is_meta() || group.takes_meta_tensors()) {
    flush_pending_transfers(group)
        .all_to_all(flat(output), flat(input), elements_of(output_counts, row * reals),
                    elements_of(input_counts, row * reals))
        ->wait();
  }
  return output;
}

/// The sharding rule of all_to_all_uneven: every dimension except the rows can be sharded.
std::optional<ShardingRule> all_to_all_uneven_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  std::vector<std::int64_t> sizes = call.tensor(0).sizes;
  rules::input_of(rule, 0) = rules::add_factors(rule, sizes);
  rules::input_of(rule, 0)[0] = {rules::add_unsharded(rule, sizes[0])};
  rule.outputs = {rules::input_of(rule, 0)};
  rule.outputs[0][0] = {rules::add_unsharded(rule, sum_of(call.integers(1)))};
  return rule;
}

at::Tensor differentiable_all_to_all_uneven(const at::Tensor& x, Counts output_counts,
                                            Counts input_counts, std::int64_t group) {
  const auto backward = [output_counts = output_counts.vec(), input_counts = input_counts.vec(),
                         group](FusedNode&, const variable_list& gradients) {
    return variable_list{AllToAllUneven::call(gradients[0], input_counts, output_counts, group)};
  };
  return recorded(formula_node("all_to_all_uneven", "AllToAllUnevenBackward", backward, x),
                  AllToAllUneven::call_below_autograd(x, output_counts, input_counts, group));
}

// Repeats and permutes rows. Backward sums rows in a fixed order; in index_select's backward, the
// order would depend on the device.

struct PermuteRows : FusedOperator<PermuteRows, at::Tensor(const at::Tensor&, const at::Tensor&,
                                                           const at::Tensor&, std::int64_t)> {
  static constexpr const char* name = "tessera::permute_rows";
  static constexpr const char* signature =
      "(Tensor x, Tensor order, Tensor inverse, int repeats=1) -> Tensor";
};

at::Tensor run_permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor&,
                            std::int64_t repeats) {
  return at::index_select(x, 0, repeats == 1 ? order : order.floor_divide(repeats));
}

std::optional<ShardingRule> permute_rows_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const std::int64_t repeated = call.tensor(1).size(0);
  rules::input_of(rule, 0) = rules::add_factors(rule, call.tensor(0).sizes);
  rules::input_of(rule, 0)[0] = {rules::add_unsharded(rule, call.tensor(0).size(0))};
  rule.outputs = {rules::input_of(rule, 0)};
  rule.outputs[0][0] = {rules::add_unsharded(rule, repeated)};
  return rule;
}

at::Tensor differentiable_permute_rows(const at::Tensor& x, const at::Tensor& order,
                                       const at::Tensor& inverse, std::int64_t repeats) {
  const auto backward = [repeats](FusedNode& node, const variable_list& gradients) {
    const at::Tensor sorted =
        PermuteRows::call(gradients[0], node.saved(1), node.saved(0), /*repeats=*/1);
    return variable_list{repeats == 1 ? sorted : sorted.unflatten(0, {-1, repeats}).sum(1)};
  };
  const auto node = formula_node("permute_rows", "PermuteRowsBackward", backward, x);
  if (node != nullptr) {
    node->save(order, inverse);
  }
  return recorded(node, PermuteRows::call_below_autograd(x, order, inverse, repeats));
}

struct GroupedLinear
    : FusedOperator<GroupedLinear, at::Tensor(const at::Tensor&, const at::Tensor&, Counts)> {
  static constexpr const char* name = "tessera::grouped_linear";
  static constexpr const char* signature = "(Tensor x, Tensor weight, int[] counts) -> Tensor";
};

/// The operator for the gradient of the weights (experts, out, in), from gradients (rows, out) and
/// inputs (rows, in).
struct GroupedWeightGrad
    : FusedOperator<GroupedWeightGrad, at::Tensor(const at::Tensor&, const at::Tensor&, Counts)> {
  static constexpr const char* name = "tessera::grouped_weight_grad";
  static constexpr const char* signature = "(Tensor grad, Tensor x, int[] counts) -> Tensor";
};

/// Whether at::_grouped_mm supports a and b: bf16 on CUDA, rows of a multiple of 16 bytes.
bool has_grouped_product(const at::Tensor& a, const at::Tensor& b) {
  const auto fits = [](const at::Tensor& t) {
    return kernels::runs_on_cuda(t) && t.scalar_type() == at::kBFloat16 && t.size(-1) % 8 == 0;
  };
  return a.size(0) > 0 && fits(a) && fits(b);
}

/// Returns for each expert the index after the expert's last row, for at::_grouped_mm.
at::Tensor ends_of(Counts counts, const at::Tensor& like) {
  std::vector<int> ends(counts.size());
  std::partial_sum(counts.begin(), counts.end(), ends.begin());
  return at::tensor(ends, at::kInt).to(like.device());
}

template <class Product>
void for_each_expert(Counts counts, Product product) {
  std::int64_t first = 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    if (counts[expert] > 0) {
      product(static_cast<std::int64_t>(expert), first, counts[expert]);
    }
    first += counts[expert];
  }
}

void check_grouped(const at::Tensor& x, const at::Tensor& weight, Counts counts) {
  TESSERA_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2),
                "grouped_linear: x has sizes ", x.sizes(), " and weight has sizes ", weight.sizes(),
                "; pass (rows, in) and (experts, out, in)");
  TESSERA_CHECK(
      static_cast<std::int64_t>(counts.size()) == weight.size(0) && sum_of(counts) == x.size(0),
      "grouped_linear: ", counts.size(), " counts with the sum ", sum_of(counts), " for ",
      weight.size(0), " experts and ", x.size(0), " rows; pass the number of rows of each expert");
}

at::Tensor run_grouped_linear(const at::Tensor& x, const at::Tensor& weight, Counts counts) {
  check_grouped(x, weight, counts);
  if (has_grouped_product(x, weight)) {
    return at::_grouped_mm(x.contiguous(), weight.transpose(1, 2), ends_of(counts, x));
  }
  const at::Tensor result = at::empty({x.size(0), weight.size(1)}, x.options());
  for_each_expert(counts, [&](std::int64_t expert, std::int64_t first, std::int64_t rows) {
    at::Tensor out = result.narrow(0, first, rows);
    at::mm_out(out, x.narrow(0, first, rows), weight[expert].t());
  });
  return result;
}

at::Tensor run_grouped_weight_grad(const at::Tensor& grad, const at::Tensor& x, Counts counts) {
  if (has_grouped_product(grad, x)) {
    return at::_grouped_mm(grad.t(), x, ends_of(counts, x));
  }
  const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(counts.size()), grad.size(1),
                                        x.size(1)};
  const at::Tensor result = at::zeros(sizes, x.options());
  for_each_expert(counts, [&](std::int64_t expert, std::int64_t first, std::int64_t rows) {
    at::Tensor out = result[expert];
    at::mm_out(out, grad.narrow(0, first, rows).t(), x.narrow(0, first, rows));
  });
  return result;
}

std::optional<ShardingRule> grouped_linear_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const TensorMeta &x = call.tensor(0), &weight = call.tensor(1);
  const int rows = rules::add_unsharded(rule, x.size(0));
  const int experts = rules::add_unsharded(rule, weight.size(0));
  const int out = rules::add_factor(rule, weight.size(1));
  const int in = rules::add_reduced(rule, weight.size(2), ReduceOp::kSum);
  rules::input_of(rule, 0) = {{rows}, {in}};
  rules::input_of(rule, 1) = {{experts}, {out}, {in}};
  rule.outputs = {{{rows}, {out}}};
  return rule;
}

std::optional<ShardingRule> grouped_weight_grad_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const int rows = rules::add_unsharded(rule, call.tensor(0).size(0));
  const auto count = static_cast<std::int64_t>(call.integers(2).size());
  const int experts = rules::add_unsharded(rule, count);
  const int out = rules::add_factor(rule, call.tensor(0).size(1));
  const int in = rules::add_factor(rule, call.tensor(1).size(1));
  rules::input_of(rule, 0) = {{rows}, {out}};
  rules::input_of(rule, 1) = {{rows}, {in}};
  rule.outputs = {{{experts}, {out}, {in}}};
  return rule;
}

at::Tensor differentiable_grouped_linear(const at::Tensor& x, const at::Tensor& weight,
                                         Counts counts) {
  const auto backward = [counts = counts.vec(), of_x = x.requires_grad(),
                         of_weight = weight.requires_grad()](FusedNode& node,
                                                             const variable_list& gradients) {
    at::Tensor x_grad, weight_grad;
    if (of_x) {
      x_grad = GroupedLinear::call(gradients[0], node.saved(1).transpose(1, 2), counts);
    }
    if (of_weight) {
      weight_grad = GroupedWeightGrad::call(gradients[0], node.saved(0), counts);
    }
    return variable_list{x_grad, weight_grad};
  };
  const auto node = formula_node("grouped_linear", "GroupedLinearBackward", backward, x, weight);
  if (node != nullptr) {
    node->save(x, weight);
  }
  return recorded(node, GroupedLinear::call_below_autograd(x, weight, counts));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<AllToAllUneven>(library, &run_all_to_all_uneven, all_to_all_uneven_rule,
                         &differentiable_all_to_all_uneven);
  define<PermuteRows>(library, &run_permute_rows, permute_rows_rule, &differentiable_permute_rows);
  define<GroupedLinear>(library, &run_grouped_linear, grouped_linear_rule,
                        &differentiable_grouped_linear);
  define<GroupedWeightGrad>(library, &run_grouped_weight_grad, grouped_weight_grad_rule);
}

}  // namespace

at::Tensor all_to_all_uneven(const at::Tensor& x, c10::IntArrayRef output_counts,
                             c10::IntArrayRef input_counts, comm::Communicator& group) {
  return AllToAllUneven::call(x, output_counts, input_counts,
                              reinterpret_cast<std::int64_t>(&group));
}

at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse,
                        std::int64_t repeats) {
  return PermuteRows::call(x, order, inverse, repeats);
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef counts) {
  return GroupedLinear::call(x, weight, counts);
}

}  // namespace tessera::detail

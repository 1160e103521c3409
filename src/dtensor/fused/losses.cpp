#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "autograd/autograd.h"
#include "fused/fused_operator.h"
#include "lowerings/lowering.h"
#include "rank/rank.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

// Cross entropy over a sharded vocabulary needs no all-gather of the logits. Two all-reduces
// suffice: the maximum, then sums, for each token. Backward needs no communication.

namespace {

void reduce(comm::Communicator& group, const at::Tensor& tensor, ReduceOp op) {
  flush_pending_transfers(group).all_reduce(tensor, op)->wait();
}

kernels::LossRows rows_of(const at::Tensor& logits, const at::Tensor& targets,
                          const VocabularyShard& shard, const RowLossOptions& options) {
  return {logits, targets, shard.vocabulary, shard.first_column, options};
}

}  // namespace

void check_options(const RowLossOptions& options) {
  TESSERA_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                "cross_entropy: label_smoothing is ", options.label_smoothing,
                "; it must be from 0 to 1");
  TESSERA_CHECK(options.z_loss >= 0 && std::isfinite(options.z_loss), "cross_entropy: z_loss is ",
                options.z_loss, "; it must be 0 or a positive number");
}

void check_loss_sizes(c10::IntArrayRef logits, c10::IntArrayRef targets) {
  TESSERA_CHECK(logits.size() == 2 && targets.size() == 1 && targets[0] == logits[0],
                "cross_entropy: logits must have sizes (tokens, vocabulary) and targets (tokens), "
                "but the sizes are ",
                logits, " and ", targets);
}

void check_targets(const at::Tensor& targets, std::int64_t vocabulary, std::int64_t ignore_index) {
  TESSERA_CHECK(targets.scalar_type() == at::kLong,
                "cross_entropy: targets must be int64, but are ", targets.scalar_type());
  if (targets.is_meta()) {
    return;
  }
  if (targets.is_cuda()) {
    return kernels::assert_indices(targets, vocabulary, ignore_index);
  }
  const at::Tensor in_range = targets.ge(0)
                                  .logical_and_(targets.lt(vocabulary))
                                  .logical_or_(targets.eq(ignore_index))
                                  .all();
  TESSERA_CHECK(in_range.item<bool>(), "cross_entropy: a target is outside the vocabulary [0, ",
                vocabulary, ") and is not ignore_index = ", ignore_index);
}

at::Tensor targets_of_rows(const at::Tensor& targets, const ShardingSpec& rows) {
  return as_layout(targets, rows);
}

bool has_consecutive_columns(const ShardingSpec& spec, int dim) {
  return spec.layout->digits(dim).size() <= 1;
}

void check_consecutive_columns(const ShardingSpec& spec, int dim) {
  TESSERA_CHECK(has_consecutive_columns(spec, dim), "cross_entropy: the logits are laid out as ",
                to_string(*spec.layout),
                ", so a rank's columns are not consecutive; redistribute the logits to Shard(", dim,
                ")");
}

VocabularyShard vocabulary_shard(const at::Tensor& tensor, int dim) {
  if (!tessera::is_distributed(tensor)) {
    return {tensor.size(dim), 0, nullptr};
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  const std::vector<int> mesh_dims = spec.layout->mesh_dims_of(dim);
  if (mesh_dims.empty()) {
    return {tensor.size(dim), 0, nullptr};
  }
  check_consecutive_columns(spec, dim);
  const std::vector<Box> boxes = owned_boxes(*spec.layout, tensor.sizes(), spec.mesh.coordinate());
  const std::int64_t first =
      boxes.empty() ? 0 : boxes.front().global_offset[static_cast<std::size_t>(dim)];
  return {tensor.size(dim), first, &spec.mesh.group(mesh_dims)};
}

RowLosses row_losses(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const RowLossOptions& options) {
  RowLosses result = kernels::empty_losses(logits);
  write_row_losses(logits, targets, shard, options, result);
  return result;
}

void write_row_losses(const at::Tensor& logits, const at::Tensor& targets,
                      const VocabularyShard& shard, const RowLossOptions& options,
                      const RowLosses& into) {
  const kernels::LossRows rows = rows_of(logits, targets, shard, options);
  if (shard.group == nullptr) {
    return kernels::row_losses(rows, into);
  }
  const kernels::RowTerms terms = kernels::row_terms(rows);
  // Computes each row's maximum over all ranks' columns. Exponentials of logits minus this maximum
  // do not overflow, and the ranks' sums of exponentials can be added.
  reduce(*shard.group, terms.all_maximum, ReduceOp::kMax);
  kernels::make_relative(rows, terms);
  reduce(*shard.group, terms.terms, ReduceOp::kSum);
  kernels::losses_of_terms(rows, terms, into);
}

void write_logits_gradient(const at::Tensor& logits, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                           const VocabularyShard& shard, const RowLossOptions& options,
                           const at::Tensor& gradient) {
  kernels::logits_gradient(rows_of(logits, targets, shard, options), log_sum_exp, of_row, gradient);
}

// Computes the cross entropy of each row of logits, by Megatron-LM's algorithm if the vocabulary is
// sharded (lowering.h). A single operator saves one copy of the logits; backward recomputes the
// softmax.

namespace {

struct CrossEntropy : FusedOperator<CrossEntropy, TwoTensors(const at::Tensor&, const at::Tensor&,
                                                             std::int64_t, double, double)> {
  static constexpr const char* name = "tessera::cross_entropy";
  static constexpr const char* signature =
      "(Tensor logits, Tensor targets, int ignore_index=-100, float label_smoothing=0.0, "
      "float z_loss=0.0) -> (Tensor losses, Tensor log_sum_exp)";
};

/// The gradient of the logits. `vocabulary`: the number of columns over all ranks; negative if
/// `logits` has all columns. Otherwise `logits` has the columns from `first_column` on.
struct CrossEntropyBackward
    : FusedOperator<CrossEntropyBackward,
                    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, std::int64_t, double, double, std::int64_t,
                               std::int64_t)> {
  static constexpr const char* name = "tessera::cross_entropy_backward";
  static constexpr const char* signature =
      "(Tensor grad, Tensor logits, Tensor targets, Tensor log_sum_exp, int ignore_index=-100, "
      "float label_smoothing=0.0, float z_loss=0.0, int first_column=0, int vocabulary=-1) "
      "-> Tensor";
};

RowLosses checked_row_losses(const at::Tensor& logits, const at::Tensor& targets,
                             const VocabularyShard& shard, const RowLossOptions& options) {
  check_options(options);
  check_loss_sizes(logits.sizes(), targets.sizes());
  check_targets(targets, shard.vocabulary, options.ignore_index);
  return row_losses(logits, targets, shard, options);
}

TwoTensors run_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                             std::int64_t ignore_index, double label_smoothing, double z_loss) {
  const VocabularyShard whole{logits.dim() == 2 ? logits.size(1) : 0, 0, nullptr};
  RowLosses rows =
      checked_row_losses(logits, targets, whole, {ignore_index, label_smoothing, z_loss});
  return {std::move(rows.losses), std::move(rows.log_sum_exp)};
}

at::Tensor run_cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum_exp,
                                      std::int64_t ignore_index, double label_smoothing,
                                      double z_loss, std::int64_t first_column,
                                      std::int64_t vocabulary) {
  at::Tensor gradient = at::empty_like(logits, at::MemoryFormat::Contiguous);
  const VocabularyShard shard{vocabulary < 0 ? logits.size(1) : vocabulary, first_column, nullptr};
  write_logits_gradient(logits, targets, log_sum_exp, grad, shard,
                        {ignore_index, label_smoothing, z_loss}, gradient);
  return gradient;
}

std::optional<ShardingRule> cross_entropy_rule(const OpCall& call) {
  const rules::Sizes& sizes = call.tensor(0).sizes;
  check_loss_sizes(sizes, call.tensor(1).sizes);
  ShardingRule rule = rules::start(call);
  const int row = rules::add_factor(rule, sizes[0]);
  const int column = rules::add_unsharded(rule, sizes[1]);
  const rules::TensorFactors rows{{row}};
  rule.inputs = {{{row}, {column}}, rows};
  rule.outputs = {rows, rows};
  return rule;
}

std::optional<ShardingRule> cross_entropy_backward_rule(const OpCall& call) {
  if (call.integer(8) >= 0) {
    return std::nullopt;
  }
  const rules::Sizes& sizes = call.tensor(1).sizes;
  ShardingRule rule = rules::start(call);
  const int row = rules::add_factor(rule, sizes[0]);
  const int column = rules::add_factor(rule, sizes[1]);
  // A rank's columns of the logits must be consecutive, because a rank finds its targets by
  // `first_column` and the number of its columns.
  rule.factors.back().contiguous = true;
  const rules::TensorFactors rows{{row}}, matrix{{row}, {column}};
  rule.inputs = {rows, matrix, rows, rows};
  rule.outputs = {matrix};
  ShardingRule::LocalCall local{call.op, call.args, 1.0, {column}};
  local.args[7] = std::int64_t{0};
  local.args[8] = sizes[1];
  rule.local_call = std::move(local);
  rule.offset_arguments = {{.arg = 7, .input = 1, .dim = 1}};
  return rule;
}

bool are_here(const at::Tensor& targets, LayoutPtr rows) {
  const DistributedTensorImpl* impl = as_distributed(targets);
  const LayoutPtr layout = impl == nullptr ? rows : impl->spec()->sharding.layout;
  return layout == rows || layout->is_replicated();
}

LayoutPtr layout_of_rows(const TensorSpec& logits) {
  const LayoutPtr layout = logits.sharding.layout;
  return Layout::intern(layout->mesh_sizes(), {layout->dims()[0]}, {});
}

/// Returns the bytes that one rank sends for cross entropy with a sharded vocabulary: a maximum,
/// then two or three sums, for each row.
std::optional<double> bytes_of_split(const BoundCall& bound) {
  const DistributedTensorImpl* logits = non_partial_argument(bound, 0);
  if (logits == nullptr || !has_consecutive_columns(logits->spec()->sharding, 1)) {
    return std::nullopt;
  }
  const TensorSpec& spec = *logits->spec();
  const at::Tensor& targets = bound.tensors[static_cast<std::size_t>(bound.call.tensor_index(1))];
  if (!are_here(targets, layout_of_rows(spec))) {
    return std::nullopt;
  }
  const double numbers = bound.call.number(3) > 0 ? 4 : 3;
  return all_reduce_bytes(spec, {1}, numbers * static_cast<double>(most_local_results(spec, {1})));
}

std::vector<c10::IValue> run_split(std::span<const c10::IValue> arguments) {
  const at::Tensor& logits = arguments[0].toTensor();
  const DistributedTensorImpl& impl = *as_distributed(logits);
  const ShardingSpec rows{impl.spec()->sharding.mesh, layout_of_rows(*impl.spec())};
  const at::Tensor targets = targets_of_rows(arguments[1].toTensor(), rows);
  const BelowAutograd guard;
  const RowLosses own =
      checked_row_losses(impl.local(), local_tensor(targets), vocabulary_shard(logits, 1),
                         {arguments[2].toInt(), arguments[3].toDouble(), arguments[4].toDouble()});
  return {make_distributed(own.losses, rows, {logits.size(0)}),
          make_distributed(own.log_sum_exp, rows, {logits.size(0)})};
}

const AddedLowerings kCrossEntropyLowerings{
    {CrossEntropy::name, bytes_of_split, run_split, /*own_collectives=*/true},
};

TwoTensors differentiable_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        std::int64_t ignore_index, double label_smoothing,
                                        double z_loss) {
  const auto backward = [=](FusedNode& node, const variable_list& gradients) {
    return variable_list{CrossEntropyBackward::call(gradients[0], node.saved(0), node.saved(1),
                                                    node.saved(2), ignore_index, label_smoothing,
                                                    z_loss, /*first_column=*/0, /*vocabulary=*/-1)};
  };
  const auto node = formula_node("cross_entropy", "CrossEntropyBackward", backward, logits);
  if (node != nullptr) {
    node->save(logits, targets);
  }
  TwoTensors result =
      CrossEntropy::call_below_autograd(logits, targets, ignore_index, label_smoothing, z_loss);
  if (node != nullptr) {
    node->save(std::get<1>(result));
    node->record(std::get<0>(result));
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<CrossEntropy>(library, &run_cross_entropy, cross_entropy_rule,
                       &differentiable_cross_entropy);
  // The sharding rule copies the option values of cross entropy into the call plan, so the cache
  // key must contain these values.
  define<CrossEntropyBackward>(library, &run_cross_entropy_backward, cross_entropy_backward_rule,
                               nullptr, /*reads_numbers=*/true);
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const RowLossOptions& options) {
  return std::get<0>(CrossEntropy::call(logits, targets, options.ignore_index,
                                        options.label_smoothing, options.z_loss));
}

}  // namespace tessera::detail

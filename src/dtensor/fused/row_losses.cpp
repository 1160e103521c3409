// The cross entropy of rows over a vocabulary that may be sharded: kernels, and two all-reduces of
// numbers per token (a maximum, then two sums) instead of an all-gather of the logits, which are
// the largest activation of a language model. Backward needs no communication.

#include "tessera/dtensor/detail/row_losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "autograd/autograd_functions.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {
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
  TESSERA_CHECK(
      logits.size() == 2 && targets.size() == 1 && targets[0] == logits[0],
      "cross_entropy: logits must be (tokens, vocabulary) and targets (tokens), but they are ",
      logits, " and ", targets);
}

void check_targets(const at::Tensor& targets, std::int64_t vocabulary, std::int64_t ignore_index) {
  TESSERA_CHECK(targets.scalar_type() == at::kLong,
                "cross_entropy: targets must be int64, but are ", targets.scalar_type());
  if (targets.is_meta()) {
    return;  // no values
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
  TESSERA_CHECK(has_consecutive_columns(spec, dim),
                "cross_entropy: a rank's columns of the vocabulary, laid out as ",
                to_string(*spec.layout), ", are not consecutive; redistribute them to Shard(", dim,
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
  // The maximum of all columns, so that no exponential overflows and the ranks' sums add up.
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

}  // namespace tessera::detail

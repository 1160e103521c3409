// The arithmetic of a cross entropy over a vocabulary that may be sharded: two all-reduces of
// numbers per token (a maximum, then two sums) instead of an all-gather of the logits, which are
// the largest activation of a language model. Backward needs no communication.

#include "tessera/dtensor/detail/row_losses.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <vector>

#include "autograd/autograd_functions.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {
namespace {

void reduce(const VocabularyShard& shard, const at::Tensor& tensor, ReduceOp op) {
  if (shard.group != nullptr) {
    flush_pending_transfers(*shard.group).all_reduce(tensor, op)->wait();
  }
}

/// The column of each target in this shard, (n, 1). Where another shard has the target, the column
/// is any valid one and `is_here`, (n, 1), is false.
struct TargetColumns {
  at::Tensor column;
  at::Tensor is_here;
};

TargetColumns target_columns(const VocabularyShard& shard, std::int64_t columns,
                             const at::Tensor& targets) {
  const at::Tensor column = targets.sub(shard.first_column).unsqueeze(1);
  const at::Tensor is_here = column.ge(0).bitwise_and_(column.lt(columns));
  // Clamped, because gather and scatter read the column before the mask can hide it.
  return {column.clamp(0, columns - 1), is_here};
}

at::Tensor row_maximum(const at::Tensor& logits) {
  if (logits.size(1) == 0) {
    // amax of an empty dimension throws; minus infinity is the neutral element of the all-reduce.
    return at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(),
                    logits.options().dtype(loss_type(logits)));
  }
  return logits.amax(1).to(loss_type(logits));
}

/// Row 0: the sum of exp(logit - maximum) over this shard; row 1: the target's logit - maximum
/// where this shard has it, else 0; row 2, for label smoothing: the sum of logit - maximum.
at::Tensor row_terms(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const at::Tensor& maximum, bool smooth) {
  at::Tensor terms = at::zeros({smooth ? 3 : 2, targets.size(0)}, maximum.options());
  if (logits.size(1) == 0) {
    return terms;
  }
  const TargetColumns target = target_columns(shard, logits.size(1), targets);
  for_each_row_block(logits, [&](std::int64_t row, std::int64_t rows) {
    at::Tensor block = logits.narrow(0, row, rows)
                           .to(maximum.scalar_type())
                           .sub(maximum.narrow(0, row, rows).unsqueeze(1));
    // Before exp_(), which overwrites the block.
    terms[1]
        .narrow(0, row, rows)
        .copy_(block.gather(1, target.column.narrow(0, row, rows))
                   .masked_fill_(target.is_here.narrow(0, row, rows).bitwise_not(), 0)
                   .squeeze(1));
    if (smooth) {
      terms[2].narrow(0, row, rows).copy_(block.sum(1));
    }
    terms[0].narrow(0, row, rows).copy_(block.exp_().sum(1));
  });
  return terms;
}

/// What backward multiplies a row's softmax by, and its one-hot target; then adds to each column.
/// All (tokens), but the last.
struct RowScales {
  at::Tensor softmax;
  at::Tensor target;
  at::Tensor all;  ///< undefined: nothing
};

RowScales row_scales(const at::Tensor& of_row, const at::Tensor& log_sum_exp,
                     std::int64_t vocabulary, const RowLossOptions& options) {
  RowScales scales{of_row, of_row.mul(options.label_smoothing - 1), {}};
  if (options.z_loss > 0) {
    scales.softmax = of_row.addcmul(of_row, log_sum_exp, 2 * options.z_loss);
  }
  if (options.label_smoothing > 0) {
    scales.all = of_row.mul(-options.label_smoothing / static_cast<double>(vocabulary));
  }
  return scales;
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
  const at::Tensor in_range = targets.ge(0)
                                  .logical_and_(targets.lt(vocabulary))
                                  .logical_or_(targets.eq(ignore_index))
                                  .all();
  if (!targets.is_cpu()) {
    at::_assert_async(in_range);
    return;
  }
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

at::ScalarType loss_type(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

RowLosses row_losses(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const RowLossOptions& options) {
  const at::Tensor maximum = row_maximum(logits);
  // The maximum of all columns, so that no exponential overflows and the ranks' sums add up.
  reduce(shard, maximum, ReduceOp::kMax);
  const double smoothing = options.label_smoothing;
  const at::Tensor terms = row_terms(logits, targets, shard, maximum, smoothing > 0);
  reduce(shard, terms, ReduceOp::kSum);

  const at::Tensor log_sum = terms[0].log();
  const at::Tensor log_sum_exp = log_sum.add(maximum);
  at::Tensor losses = log_sum.sub(terms[1], 1 - smoothing);
  if (smoothing > 0) {
    losses.sub_(terms[2], smoothing / static_cast<double>(shard.vocabulary));
  }
  if (options.z_loss > 0) {
    losses.add_(log_sum_exp.square(), options.z_loss);
  }
  return {losses.masked_fill_(targets.eq(options.ignore_index), 0), log_sum_exp};
}

void write_logits_gradient(const at::Tensor& logits, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                           const VocabularyShard& shard, const RowLossOptions& options,
                           const at::Tensor& gradient) {
  if (logits.size(1) == 0) {
    return;
  }
  const RowScales scales = row_scales(of_row.masked_fill(targets.eq(options.ignore_index), 0),
                                      log_sum_exp, shard.vocabulary, options);
  const TargetColumns target = target_columns(shard, logits.size(1), targets);
  const at::Tensor at_target = scales.target.unsqueeze(1).mul(target.is_here);
  for_each_row_block(logits, [&](std::int64_t row, std::int64_t rows) {
    const auto column = [&](const at::Tensor& values) {
      return values.narrow(0, row, rows).unsqueeze(1);
    };
    // A copy, also of the same type: `gradient` may be `logits`.
    at::Tensor block = logits.narrow(0, row, rows)
                           .to(log_sum_exp.scalar_type())
                           .sub(column(log_sum_exp))
                           .exp_()
                           .mul_(column(scales.softmax));
    block.scatter_add_(1, target.column.narrow(0, row, rows), at_target.narrow(0, row, rows));
    if (scales.all.defined()) {
      block.add_(column(scales.all));
    }
    gradient.narrow(0, row, rows).copy_(block);
  });
}

}  // namespace tessera::detail

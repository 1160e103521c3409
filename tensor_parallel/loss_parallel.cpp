#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// This rank's columns of the logits.
struct VocabularyShard {
  at::Tensor logits;  ///< (tokens, columns)
  std::int64_t first_column = 0;
  comm::Communicator* group = nullptr;  ///< who holds the others; nullptr: nobody

  std::int64_t columns() const { return logits.size(1); }
};

VocabularyShard vocabulary_shard(const at::Tensor& logits) {
  if (!tessera::is_distributed(logits)) {
    return {logits, 0, nullptr};
  }
  const ShardingSpec& spec = sharding_spec(logits);
  TESSERA_CHECK(spec.mesh.ndim() == 1, "cross_entropy: the logits are on ", to_string(spec.mesh),
                "; pass logits on a 1-D mesh (the tensor-parallel dimension)");
  TESSERA_CHECK(!spec.layout->is_partial() && spec.layout->sharded_dim(0) != 0,
                "cross_entropy: the logits lie as ", to_string(*spec.layout),
                "; redistribute them to Shard(1) or Replicate()");
  if (spec.layout->is_replicated()) {
    return {local_tensor(logits), 0, nullptr};
  }
  return {local_tensor(logits),
          chunk_offset(logits.size(1), spec.mesh.size(), spec.mesh.local_rank()),
          &spec.mesh.group(0)};
}

void reduce(const VocabularyShard& shard, const at::Tensor& tensor, ReduceOp op) {
  if (shard.group != nullptr) {
    shard.group->all_reduce(tensor, op)->wait();
  }
}

at::ScalarType compute_type(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Calls `body(first_row, rows)` for blocks of rows small enough that their working copy stays in
/// cache on a CPU and in a modest buffer on a GPU.
template <class Body>
void for_each_row_block(const at::Tensor& matrix, Body&& body) {
  const std::int64_t block_elements =
      matrix.is_cpu() ? std::int64_t{1} << 16 : std::int64_t{1} << 26;
  const std::int64_t step =
      std::max<std::int64_t>(1, block_elements / std::max<std::int64_t>(1, matrix.size(1)));
  for (std::int64_t row = 0; row < matrix.size(0); row += step) {
    body(row, std::min(step, matrix.size(0) - row));
  }
}

/// Where each target lies in this shard: a valid column (n, 1) and whether it is the target's (n,
/// 1).
struct TargetColumns {
  at::Tensor column;
  at::Tensor is_here;
};

TargetColumns target_columns(const VocabularyShard& shard, const at::Tensor& targets) {
  const at::Tensor column = targets.sub(shard.first_column).unsqueeze(1);
  const at::Tensor is_here = column.ge(0).logical_and_(column.lt(shard.columns()));
  return {column.clamp(0, shard.columns() - 1), is_here};
}

at::Tensor row_maximum(const VocabularyShard& shard, at::ScalarType type) {
  if (shard.columns() == 0) {
    return at::full({shard.logits.size(0)}, -std::numeric_limits<double>::infinity(),
                    shard.logits.options().dtype(type));
  }
  return shard.logits.amax(1).to(type);
}

/// Row 0: the sum of exp(logit - maximum) over this shard; row 1: the target's logit - maximum
/// where this shard has it, else 0.
at::Tensor row_terms(const VocabularyShard& shard, const at::Tensor& targets,
                     const at::Tensor& maximum) {
  at::Tensor terms = at::zeros({2, targets.size(0)}, maximum.options());
  if (shard.columns() == 0) {
    return terms;
  }
  const TargetColumns target = target_columns(shard, targets);
  for_each_row_block(shard.logits, [&](std::int64_t row, std::int64_t rows) {
    at::Tensor block = shard.logits.narrow(0, row, rows)
                           .to(maximum.scalar_type())
                           .sub(maximum.narrow(0, row, rows).unsqueeze(1));
    terms[1]
        .narrow(0, row, rows)
        .copy_(block.gather(1, target.column.narrow(0, row, rows))
                   .masked_fill_(target.is_here.narrow(0, row, rows).logical_not(), 0)
                   .squeeze(1));
    terms[0].narrow(0, row, rows).copy_(block.exp_().sum(1));
  });
  return terms;
}

/// (softmax - one_hot(target)) * row_scale, in the type of the logits.
at::Tensor logits_gradient(const VocabularyShard& shard, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& row_scale) {
  at::Tensor gradient = at::empty_like(shard.logits, at::MemoryFormat::Contiguous);
  if (shard.columns() == 0) {
    return gradient;
  }
  const TargetColumns target = target_columns(shard, targets);
  const at::Tensor minus_one_hot = target.is_here.to(log_sum_exp.scalar_type()).neg_();
  for_each_row_block(shard.logits, [&](std::int64_t row, std::int64_t rows) {
    at::Tensor block = shard.logits.narrow(0, row, rows)
                           .to(log_sum_exp.scalar_type())
                           .sub(log_sum_exp.narrow(0, row, rows).unsqueeze(1))
                           .exp_();
    block.scatter_add_(1, target.column.narrow(0, row, rows), minus_one_hot.narrow(0, row, rows));
    gradient.narrow(0, row, rows).copy_(block.mul_(row_scale.narrow(0, row, rows).unsqueeze(1)));
  });
  return gradient;
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& targets, std::int64_t ignore_index) {
    const VocabularyShard shard = vocabulary_shard(logits);
    const at::Tensor maximum = row_maximum(shard, compute_type(logits));
    reduce(shard, maximum, ReduceOp::kMax);
    const at::Tensor terms = row_terms(shard, targets, maximum);
    reduce(shard, terms, ReduceOp::kSum);

    const at::Tensor log_sum = terms[0].log();
    const at::Tensor counted = targets.ne(ignore_index);
    const at::Tensor count = counted.sum();
    const at::Tensor losses = log_sum.sub(terms[1]).masked_fill_(counted.logical_not(), 0);
    ctx->save_for_backward(
        {logits, targets, log_sum.add(maximum), counted.to(maximum.scalar_type()).div_(count)});
    return losses.sum().div_(count);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const VocabularyShard shard = vocabulary_shard(logits);
    at::Tensor gradient = logits_gradient(shard, saved[1], saved[2], saved[3].mul(gradients[0]));
    if (tessera::is_distributed(logits)) {
      gradient = make_distributed(gradient, sharding_spec(logits), logits.sizes().vec());
    }
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

void check_targets(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignore_index) {
  TESSERA_CHECK(
      logits.dim() == 2 && targets.dim() == 1 && targets.size(0) == logits.size(0),
      "cross_entropy: logits must be (tokens, vocabulary) and targets (tokens), but they are ",
      logits.sizes(), " and ", targets.sizes());
  TESSERA_CHECK(targets.scalar_type() == at::kLong,
                "cross_entropy: targets must be int64, but are ", targets.scalar_type());
  TESSERA_CHECK(!tessera::is_distributed(targets),
                "cross_entropy: targets must be plain, the same on every rank of the logits' mesh; "
                "pass full_tensor()");
  const at::Tensor in_range = targets.ge(0)
                                  .logical_and_(targets.lt(logits.size(1)))
                                  .logical_or_(targets.eq(ignore_index))
                                  .all();
  if (!targets.is_cpu()) {
    at::_assert_async(in_range);  // without a host synchronisation
    return;
  }
  TESSERA_CHECK(in_range.item<bool>(), "cross_entropy: a target is outside the vocabulary [0, ",
                logits.size(1), ") and is not ignore_index = ", ignore_index);
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         std::int64_t ignore_index) {
  check_targets(logits, targets, ignore_index);
  return CrossEntropy::apply(logits, targets, ignore_index);
}

}  // namespace tessera::tensor_parallel

// Checks a loss's targets and options, and reduces the losses of rows to one number, also where the
// rows are on several ranks.

#include "loss/targets.h"

#include <ATen/ops/_assert_async.h>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/detail/calls.h"

namespace tessera::tensor_parallel {
namespace {

/// Ranks with different numbers of ignored targets would each give their mean the same weight.
void check_counts_alike(const at::Tensor& count, std::int64_t tokens) {
  const std::int64_t ranks = nn::batch_ranks();
  if (ranks == 1 || count.is_meta()) {
    return;
  }
  if (!count.is_cpu()) {
    at::_assert_async(count.eq(tokens),
                      "cross_entropy: targets are ignored and ranks share the batch; pass "
                      "CrossEntropyOptions::over or tokens");
    return;
  }
  const std::int64_t ignored = tokens - count.item<std::int64_t>();
  TESSERA_CHECK(
      ignored == 0, "cross_entropy: ", ignored, " of ", tokens, " targets are ignored, and ", ranks,
      " data-parallel ranks share the batch: a mean of their means is not the mean of "
      "the tokens; pass {.over = mesh} with the mesh that fully_shard has, of micro-batches "
      "{.tokens = tokens_per_rank(targets, mesh)}, or where this rank trains by itself "
      "their number here");
}

at::Tensor whole(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

}  // namespace

at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index) {
  return whole(targets.ne(ignore_index).sum());
}

at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh) {
  nn::note_weighing();
  const at::Tensor sum = count.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const DeviceMesh flat = mesh.ndim() == 1 ? mesh : mesh.flatten();
  if (flat.size() > 1) {
    flat.group().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  // Without any token: a sum of no losses, divided by at least 1.
  return sum.clamp_min(1).div_(flat.size());
}

tessera::detail::RowLossOptions row_options(const CrossEntropyOptions& options) {
  return {options.ignore_index, options.label_smoothing, options.z_loss};
}

void check_options(const CrossEntropyOptions& options) {
  tessera::detail::check_options(row_options(options));
  TESSERA_CHECK(!options.tokens.defined() || options.reduction == Reduction::kMean,
                "cross_entropy: tokens are what a mean is over; leave them out, or use kMean");
  TESSERA_CHECK(
      !options.over || (options.reduction == Reduction::kMean && !options.tokens.defined()),
      "cross_entropy: `over` is what a mean is over, and counts its tokens itself; leave "
      "it out for another reduction, and beside `tokens`");
  TESSERA_CHECK(!options.tokens.defined() || options.tokens.dim() == 0,
                "cross_entropy: tokens must be one number, but have sizes ",
                options.tokens.sizes());
}

TokenSharding token_sharding(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return std::nullopt;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  return ShardingSpec{spec.mesh,
                      Layout::intern(spec.layout->mesh_sizes(), {spec.layout->digits(0)})};
}

bool are_split(const TokenSharding& rows) {
  return rows && !rows->layout->is_replicated();
}

at::Tensor own_targets(const at::Tensor& targets, std::int64_t vocabulary,
                       const TokenSharding& rows, std::int64_t ignore_index) {
  const bool distributed = tessera::is_distributed(targets);
  TESSERA_CHECK(!distributed || (rows && sharding_spec(targets).mesh == rows->mesh),
                "cross_entropy: targets must be plain, the same on every rank of the logits' mesh, "
                "or distributed on it; pass full_tensor()");
  if (!distributed && are_split(rows)) {
    tessera::detail::check_targets(targets, vocabulary, ignore_index);
  }
  return rows ? tessera::detail::targets_of_rows(targets, *rows) : targets;
}

void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim) {
  if (!tessera::detail::debug_checks() || !tessera::is_distributed(sharded)) {
    return;
  }
  const ShardingSpec& spec = sharding_spec(sharded);
  for (const int mesh_dim : spec.layout->mesh_dims_of(dim)) {
    tessera::detail::check_replicas(
        tessera::detail::peers_along(spec.mesh, mesh_dim),
        {{"the targets", local_tensor(own_targets)}}, tessera::detail::Equality::kBitwise,
        "cross_entropy of logits sharded over the vocabulary",
        "each rank looks for its targets in its own columns: give all of them the same batch");
  }
}

at::Tensor losses_of_rows(const at::Tensor& losses) {
  return are_split(token_sharding(losses)) ? losses : whole(losses);
}

at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets,
                        const CrossEntropyOptions& options) {
  at::Tensor all = whole(sum);
  if (options.reduction == Reduction::kSum) {
    return all;
  }
  if (options.tokens.defined()) {
    nn::note_weighing();
    return all.div(options.tokens.to(all.options()));
  }
  const at::Tensor count = count_of(targets, options.ignore_index);
  if (options.over) {
    return all.div(mean_count(count, options.over).to(all.options()));
  }
  if (all.requires_grad()) {
    check_counts_alike(count, targets.size(0));
  }
  return all.div(count.clamp_min(1));
}

}  // namespace tessera::tensor_parallel

// What a loss asks of its targets and options, and how the losses of rows become one number, also
// where the rows are on several ranks.

#include "loss/targets.h"

#include <ATen/ops/_assert_async.h>

#include <cmath>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/detail/batch_ranks.h"

namespace tessera::tensor_parallel {
namespace {

/// An index outside is in no rank's columns: the loss would silently lack a term.
void check_in_vocabulary(const at::Tensor& targets, std::int64_t vocabulary,
                         std::int64_t ignore_index) {
  if (targets.is_meta()) {
    return;  // no values
  }
  const at::Tensor in_range = targets.ge(0)
                                  .logical_and_(targets.lt(vocabulary))
                                  .logical_or_(targets.eq(ignore_index))
                                  .all();
  if (!targets.is_cpu()) {
    at::_assert_async(in_range);  // without a host synchronisation
    return;
  }
  TESSERA_CHECK(in_range.item<bool>(), "cross_entropy: a target is outside the vocabulary [0, ",
                vocabulary, ") and is not ignore_index = ", ignore_index);
}

/// Ranks that ignore differently many targets would each give their own mean the same weight.
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

/// The sum over all rows, of the ranks' sums.
at::Tensor sum_over_rows(const at::Tensor& sum, const TokenSharding& rows) {
  if (!rows) {
    return sum;
  }
  Placements terms(static_cast<std::size_t>(rows->mesh.ndim()), Replicate{});
  for (const int mesh_dim : rows->layout->mesh_dims_of(0)) {
    terms[static_cast<std::size_t>(mesh_dim)] = Partial{};
  }
  return DistributedTensor::from_local(sum, rows->mesh, terms).full_tensor();
}

}  // namespace

at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index) {
  const at::Tensor count = targets.ne(ignore_index).sum();
  return tessera::is_distributed(count) ? DistributedTensor(count).full_tensor() : count;
}

at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh) {
  nn::note_weighing();
  const at::Tensor sum = count.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const DeviceMesh flat = mesh.ndim() == 1 ? mesh : mesh.flatten();
  if (flat.size() > 1) {
    flat.group().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  // No token at all: a sum of no losses divided by something.
  return sum.clamp_min(1).div_(flat.size());
}

void check_options(const CrossEntropyOptions& options) {
  TESSERA_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                "cross_entropy: label_smoothing is ", options.label_smoothing,
                "; it must be from 0 to 1");
  TESSERA_CHECK(options.z_loss >= 0 && std::isfinite(options.z_loss), "cross_entropy: z_loss is ",
                options.z_loss, "; it must be 0 or a positive number");
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
  if (!tessera::is_distributed(tensor) || tensor.dim() == 0) {
    return std::nullopt;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  if (spec.layout->mesh_dims_of(0).empty()) {
    return std::nullopt;
  }
  return ShardingSpec{spec.mesh,
                      Layout::intern(spec.layout->mesh_sizes(), {spec.layout->digits(0)})};
}

at::Tensor local_targets(const at::Tensor& targets, at::IntArrayRef sizes, std::int64_t vocabulary,
                         const TokenSharding& rows, std::int64_t ignore_index) {
  TESSERA_CHECK(
      sizes.size() == 2 && targets.dim() == 1 && targets.size(0) == sizes[0],
      "cross_entropy: logits must be (tokens, vocabulary) and targets (tokens), but they are ",
      sizes, " and ", targets.sizes());
  TESSERA_CHECK(targets.scalar_type() == at::kLong,
                "cross_entropy: targets must be int64, but are ", targets.scalar_type());
  const bool distributed = tessera::is_distributed(targets);
  TESSERA_CHECK(!distributed || (rows && sharding_spec(targets).mesh == rows->mesh),
                "cross_entropy: targets must be plain, the same on every rank of the logits' mesh, "
                "or distributed on it as the rows of the logits are; pass full_tensor()");
  if (!distributed) {
    check_in_vocabulary(targets, vocabulary, ignore_index);
  }
  if (!rows) {
    return targets;
  }
  const DistributedTensor all =
      distributed ? DistributedTensor(targets)
                  : DistributedTensor(make_distributed(
                        targets, {rows->mesh, Layout::replicated(rows->layout->mesh_sizes(), 1)},
                        targets.sizes().vec()));
  const DistributedTensor own = all.layout() == rows->layout ? all : all.redistribute(rows->layout);
  if (distributed) {
    check_in_vocabulary(local_tensor(own), vocabulary, ignore_index);
  }
  return local_tensor(own);
}

void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim) {
  if (!tessera::detail::debug_checks() || !tessera::is_distributed(sharded)) {
    return;
  }
  const ShardingSpec& spec = sharding_spec(sharded);
  for (const int mesh_dim : spec.layout->mesh_dims_of(dim)) {
    tessera::detail::check_replicas(
        tessera::detail::peers_along(spec.mesh, mesh_dim), {{"the targets", own_targets.detach()}},
        tessera::detail::Equality::kBitwise, "cross_entropy of logits sharded over the vocabulary",
        "each rank looks for its targets in its own columns: give all of them the same batch");
  }
}

at::Tensor losses_of_rows(const at::Tensor& losses, const TokenSharding& rows,
                          std::int64_t tokens) {
  return rows ? DistributedTensor::from_local(losses, *rows, {tokens}).tensor() : losses;
}

at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets, const TokenSharding& rows,
                        const CrossEntropyOptions& options) {
  const at::Tensor all = sum_over_rows(sum, rows);
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

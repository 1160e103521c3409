#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tessera/dtensor/detail/row_losses.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {

/// What of the options is each row's own.
tessera::detail::RowLossOptions row_options(const CrossEntropyOptions& options);
/// Throws Error for options that cross_entropy's comment refuses.
void check_options(const CrossEntropyOptions& options);

/// How the rows of logits lie on their mesh; nullopt: they are plain.
using TokenSharding = std::optional<ShardingSpec>;

/// That of a tensor whose dimension 0 is the tokens.
TokenSharding token_sharding(const at::Tensor& tensor);
/// Whether a rank has some of the rows only.
bool are_split(const TokenSharding& rows);

/// The targets of the rows: distributed as these are, or plain. Throws Error for targets that are
/// on another mesh; and for plain ones that check_targets refuses, on every rank, where a rank has
/// some of the rows only. Collective if the targets are distributed otherwise than the rows.
at::Tensor own_targets(const at::Tensor& targets, std::int64_t vocabulary,
                       const TokenSharding& rows, std::int64_t ignore_index);

/// With TESSERA_DEBUG=1: throws Error, on all ranks, if those that share out dimension `dim` of
/// `sharded`, the vocabulary, have different targets for the same rows. Then collective.
void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim);

/// How many targets of all rows count: plain.
at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index);
/// The mean of the ranks' counts over those of `mesh`, fp64, > 0. Collective over it.
at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh);

/// What kNone makes of the losses of the rows: plain where every rank has all of them.
at::Tensor losses_of_rows(const at::Tensor& losses);
/// What kSum or kMean makes of `sum`, the sum of the losses, plain or pending: one plain number.
/// Differentiable.
at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets,
                        const CrossEntropyOptions& options);

}  // namespace tessera::tensor_parallel

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tessera/dtensor/detail/row_losses.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {

/// The options that apply to each row.
tessera::detail::RowLossOptions row_options(const CrossEntropyOptions& options);
/// Throws Error for options that cross_entropy's comment refuses.
void check_options(const CrossEntropyOptions& options);

/// How the rows of logits are sharded on their mesh; nullopt: they are plain.
using TokenSharding = std::optional<ShardingSpec>;

/// The sharding of a tensor whose dimension 0 is the tokens.
TokenSharding token_sharding(const at::Tensor& tensor);
/// Whether each rank has only some of the rows.
bool are_split(const TokenSharding& rows);

/// The targets of the rows: distributed as the rows are, or plain. Throws Error for targets on
/// another mesh; and on every rank for plain ones that check_targets refuses, where a rank has only
/// some of the rows. Collective if the targets are distributed otherwise than the rows.
at::Tensor own_targets(const at::Tensor& targets, std::int64_t vocabulary,
                       const TokenSharding& rows, std::int64_t ignore_index);

/// With TESSERA_DEBUG=1: throws Error, on all ranks, if ranks that split dimension `dim` of
/// `sharded`, the vocabulary, have different targets for the same rows. Then collective.
void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim);

/// The number of targets of all rows that are not ignored: plain.
at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index);
/// The mean of the ranks' counts over those of `mesh`, fp64, > 0. Collective over it.
at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh);

/// The result for kNone from the losses of the rows: plain where every rank has all of them.
at::Tensor losses_of_rows(const at::Tensor& losses);
/// The result for kSum or kMean from `sum`, the sum of the losses, plain or pending: one plain
/// number. Differentiable.
at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets,
                        const CrossEntropyOptions& options);

}  // namespace tessera::tensor_parallel

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {

/// Throws Error for options that cross_entropy's comment refuses.
void check_options(const CrossEntropyOptions& options);

/// How the rows of logits lie: nullopt: all are on every rank, or plain.
using TokenSharding = std::optional<ShardingSpec>;

/// That of a tensor whose dimension 0 is the tokens.
TokenSharding token_sharding(const at::Tensor& tensor);

/// The targets of this rank's rows, plain. `sizes`: of the logits, or of what they are computed
/// from, (tokens, _); `vocabulary`: the targets' bound. Throws Error for targets that do not fit,
/// or are outside of the vocabulary.
at::Tensor local_targets(const at::Tensor& targets, at::IntArrayRef sizes, std::int64_t vocabulary,
                         const TokenSharding& rows, std::int64_t ignore_index);

/// With TESSERA_DEBUG=1: throws Error, on all ranks, if those that share out dimension `dim` of
/// `sharded`, the vocabulary, have different targets for the same rows. Then collective.
void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim);

/// How many targets of all rows count: plain.
at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index);
/// The mean of the ranks' counts over those of `mesh`, fp64, > 0. Collective over it.
at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh);

/// What `options.reduction` makes of the losses. kNone: `losses`, (tokens of this rank), as
/// distributed as the rows. Else of `sum`, the sum of this rank's losses. Differentiable.
at::Tensor losses_of_rows(const at::Tensor& losses, const TokenSharding& rows, std::int64_t tokens);
at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets, const TokenSharding& rows,
                        const CrossEntropyOptions& options);

}  // namespace tessera::tensor_parallel

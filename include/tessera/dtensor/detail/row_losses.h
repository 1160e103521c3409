#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/cross_entropy.h"

/// The arithmetic of a cross entropy on one rank's rows and columns of the logits: what
/// tessera::cross_entropy and the loss of a head that is never whole are made of.
TESSERA_API_BEGIN
namespace tessera::detail {

using kernels::RowLosses;
using kernels::RowLossOptions;

/// Throws Error for options outside of their ranges.
void check_options(const RowLossOptions& options);
/// Throws Error unless the sizes are (tokens, vocabulary) and (tokens).
void check_loss_sizes(c10::IntArrayRef logits, c10::IntArrayRef targets);
/// Throws Error for plain `targets` that are not int64, or that are outside of the vocabulary and
/// not ignored: such an index is in no rank's columns, and the loss would silently lack a term. On
/// a GPU the latter is an assertion of the device, without a host synchronisation.
void check_targets(const at::Tensor& targets, std::int64_t vocabulary, std::int64_t ignore_index);

/// `targets`, plain (the same on every rank) or distributed on the mesh of `rows`, as the rows lie.
/// Collective if they are distributed otherwise.
at::Tensor targets_of_rows(const at::Tensor& targets, const ShardingSpec& rows);

/// Which columns of the logits a rank has.
struct VocabularyShard {
  std::int64_t vocabulary = 0;          ///< columns of all ranks
  std::int64_t first_column = 0;        ///< of this rank
  comm::Communicator* group = nullptr;  ///< of the ranks with the other columns; nullptr: none
};

/// Whether each rank's part of dimension `dim` is one range, by which it tells targets in its
/// columns.
bool has_consecutive_columns(const ShardingSpec& spec, int dim);
/// Throws Error where it is not.
void check_consecutive_columns(const ShardingSpec& spec, int dim);
/// The shard of a tensor whose dimension `dim` is the vocabulary. Throws Error if its columns on a
/// rank are not consecutive. Makes the group at its first use, which is collective.
VocabularyShard vocabulary_shard(const at::Tensor& tensor, int dim);

/// The losses of rows of `logits`, (tokens, this rank's columns), with `targets` (tokens). Two
/// all-reduces over the group of the shard.
RowLosses row_losses(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const RowLossOptions& options);
/// The same, into the caller's tensors.
void write_row_losses(const at::Tensor& logits, const at::Tensor& targets,
                      const VocabularyShard& shard, const RowLossOptions& options,
                      const RowLosses& into);

/// Writes the gradient of the sum of `of_row` times the rows' losses, (tokens) in loss_type() or
/// undefined for ones, to `gradient`, which has the sizes of `logits` and may be the same tensor.
/// Not collective.
void write_logits_gradient(const at::Tensor& logits, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                           const VocabularyShard& shard, const RowLossOptions& options,
                           const at::Tensor& gradient);

}  // namespace tessera::detail
TESSERA_API_END

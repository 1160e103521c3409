#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/cross_entropy.h"

/// The arithmetic of cross entropy on one rank's rows and columns of the logits. Used by
/// tessera::cross_entropy and by linear_cross_entropy, which never has the whole logits.
TESSERA_API_BEGIN
namespace tessera::detail {

using kernels::RowLosses;
using kernels::RowLossOptions;

/// Throws Error for options that are outside of their valid ranges.
void check_options(const RowLossOptions& options);
/// Throws Error unless the sizes are (tokens, vocabulary) for logits and (tokens) for targets.
void check_loss_sizes(c10::IntArrayRef logits, c10::IntArrayRef targets);
/// Throws Error for plain `targets` that are not int64, or that are outside of the vocabulary and
/// not ignored: no rank has the column of such an index, so the loss would silently lack a term. On
/// a GPU the range check is a device assertion, without host synchronisation.
void check_targets(const at::Tensor& targets, std::int64_t vocabulary, std::int64_t ignore_index);

/// `targets` in the layout of the rows. `targets` are plain (the same on every rank) or distributed
/// on the mesh of `rows`. Collective if their layout differs from that of the rows.
at::Tensor targets_of_rows(const at::Tensor& targets, const ShardingSpec& rows);

/// A rank's range of columns of the logits, which are split by the vocabulary.
struct VocabularyShard {
  std::int64_t vocabulary = 0;          ///< total number of columns over all ranks
  std::int64_t first_column = 0;        ///< number of this rank's first column
  comm::Communicator* group = nullptr;  ///< process group of the ranks that share the vocabulary;
                                        ///< nullptr: this rank has all columns
};

/// Whether each rank's part of dimension `dim` is one contiguous range, so that a rank can tell
/// which targets are in its columns.
bool has_consecutive_columns(const ShardingSpec& spec, int dim);
/// Throws Error unless has_consecutive_columns() is true.
void check_consecutive_columns(const ShardingSpec& spec, int dim);
/// This rank's vocabulary shard of a tensor whose dimension `dim` is the vocabulary. Throws Error
/// if a rank's columns are not consecutive. The first call creates the process group, which is
/// collective.
VocabularyShard vocabulary_shard(const at::Tensor& tensor, int dim);

/// The losses of the rows of `logits`, (tokens, this rank's columns), with `targets` (tokens).
/// Collective if the shard has a group: two all-reduces over the group.
RowLosses row_losses(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const RowLossOptions& options);
/// Like row_losses(), but writes to the caller's tensors.
void write_row_losses(const at::Tensor& logits, const at::Tensor& targets,
                      const VocabularyShard& shard, const RowLossOptions& options,
                      const RowLosses& into);

/// Writes the gradient of the logits to `gradient`, which has the sizes of `logits` and may be the
/// same tensor. `of_row`: the gradient of each row's loss, (tokens) in loss_type(); undefined for
/// ones. Not collective.
void write_logits_gradient(const at::Tensor& logits, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                           const VocabularyShard& shard, const RowLossOptions& options,
                           const at::Tensor& gradient);

}  // namespace tessera::detail
TESSERA_API_END

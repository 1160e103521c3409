#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"

/// Cross entropy of a matrix of logits, on local tensors, without autograd. Kernels (fp32 and bf16;
/// on CUDA also fp16) compute in fp32 and give the same bits in every run. Other types and devices
/// use ATen operators.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// The options of the loss of one row of logits; see tensor_parallel::CrossEntropyOptions.
struct RowLossOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
};

/// A matrix of logits. Rows are tokens; columns are this rank's shard of the vocabulary.
struct LossRows {
  at::Tensor logits;   ///< the logits, (rows, columns)
  at::Tensor targets;  ///< the target of each row, (rows) int64
  std::int64_t vocabulary = 0;
  std::int64_t first_column = 0;
  RowLossOptions options{};
};

/// The results of a cross entropy for each row: tensors of size (rows).
struct RowLosses {
  at::Tensor losses;  ///< the loss of each row, of type loss_type(); 0 if the target is ignored
  /// The log-sum-exp of each row over the whole vocabulary: (rows). fp64, so that a logit minus its
  /// row's log-sum-exp is precise even if both numbers are large.
  at::Tensor log_sum_exp;
};
/// Allocates uninitialized results for the rows of `logits`.
RowLosses empty_losses(const at::Tensor& logits);

/// This rank's terms of the losses, if the vocabulary is sharded over ranks. The terms are computed
/// from the logits in this rank's columns.
struct RowTerms {
  at::Tensor maximum;      ///< each row's largest logit in this rank's columns, (rows)
  at::Tensor all_maximum;  ///< copy of `maximum`; the caller all-reduces the copy (max)
  /// For each row of logits: the sum of exponentials, the target's logit and, with label smoothing,
  /// the sum of the logits. Sizes: (2 or 3, rows). The caller sums `terms` over the ranks.
  at::Tensor terms;
};

/// Returns the dtype of the losses: fp32, or fp64 for fp64 logits.
at::ScalarType loss_type(const at::Tensor& logits);

/// Computes the loss of each row of logits, if this rank has all columns of the vocabulary.
void row_losses(const LossRows& rows, const RowLosses& into);

/// Functions for a vocabulary that is split over ranks: row_terms(), all-reduce of `all_maximum`
/// (max), make_relative(), all-reduce of `terms` (sum), losses_of_terms(). The caller all-reduces.
RowTerms row_terms(const LossRows& rows);
void make_relative(const LossRows& rows, const RowTerms& terms);
void losses_of_terms(const LossRows& rows, const RowTerms& terms, const RowLosses& into);

/// Writes the gradient of the logits to `gradient`, which can be the logits tensor. `of_row`: the
/// gradients of the losses, (rows) in loss_type(); undefined means ones.
void logits_gradient(const LossRows& rows, const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                     const at::Tensor& gradient);

/// Returns `tensor` times `factor`, rounded once to `type`. `tensor` has the type `type` or the
/// type of `factor`. `factor` has one element of loss_type() on the device of `tensor`.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, at::ScalarType type);

/// On CUDA, asserts in a kernel, without synchronising the CPU with the device, that each of
/// `indices` is in [0, size) or equal to `ignored`.
void assert_indices(const at::Tensor& indices, std::int64_t size, std::int64_t ignored);

}  // namespace tessera::kernels
TESSERA_API_END

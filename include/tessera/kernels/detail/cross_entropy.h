#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"

/// The cross entropy of rows of logits, local tensors without autograd. fp32, bf16 and fp16 on
/// CUDA, and fp32 and bf16 on a CPU, are read once, by kernels that compute in fp32 and give the
/// same bits in every run; of other types and devices the same formulas are ATen operators.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// The options of a row's loss. tensor_parallel::CrossEntropyOptions documents the fields.
struct RowLossOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
};

/// Rows, and this rank's columns of the vocabulary.
struct LossRows {
  at::Tensor logits;   ///< (rows, columns)
  at::Tensor targets;  ///< (rows) int64
  std::int64_t vocabulary = 0;
  std::int64_t first_column = 0;
  RowLossOptions options{};
};

/// (rows) each.
struct RowLosses {
  at::Tensor losses;  ///< in loss_type(); 0 where the target is ignored
  /// Over all columns, in fp64: what large logits are relative to keeps the digits of their
  /// differences.
  at::Tensor log_sum_exp;
};
/// Without values, for these logits.
RowLosses empty_losses(const at::Tensor& logits);

/// What one rank's columns say of the losses of a split vocabulary.
struct RowTerms {
  at::Tensor maximum;      ///< (rows)
  at::Tensor all_maximum;  ///< (rows): the same, to be reduced over the ranks
  /// (2 or 3, rows): the sum of exponentials, the target's logit, and with label smoothing the sum
  /// of the logits.
  at::Tensor terms;
};

/// fp32, or fp64 of fp64: sums of exponentials over a vocabulary need more than the 8 or 11 bits of
/// a half type.
at::ScalarType loss_type(const at::Tensor& logits);

/// Writes the losses of a whole vocabulary.
void row_losses(const LossRows& rows, const RowLosses& into);

/// For a split vocabulary: the terms; after the maximum over the ranks is in all_maximum, the terms
/// relative to it, in their place; and after the sum over the ranks is in terms, the losses.
RowTerms row_terms(const LossRows& rows);
void make_relative(const LossRows& rows, const RowTerms& terms);
void losses_of_terms(const LossRows& rows, const RowTerms& terms, const RowLosses& into);

/// Writes the gradient of the sum of `of_row` times the rows' losses to `gradient`, which may be
/// the logits. `of_row`: (rows) in loss_type(), or undefined for ones.
void logits_gradient(const LossRows& rows, const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                     const at::Tensor& gradient);

/// `tensor`, of `type` or of that of `factor`, times the number `factor`, which is on its device
/// and of loss_type(); rounded once to `type`.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, at::ScalarType type);

/// On CUDA: asserts there, without a wait of the host, that each of `indices` is from 0 to below
/// `size` or is `ignored`.
void assert_indices(const at::Tensor& indices, std::int64_t size, std::int64_t ignored);

}  // namespace tessera::kernels
TESSERA_API_END

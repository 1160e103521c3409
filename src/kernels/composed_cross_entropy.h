// The cross entropy of rows as ATen operators: of fp64, of fp16 on a CPU, and without values.
#pragma once

#include "tessera/kernels/detail/cross_entropy.h"

namespace tessera::kernels::by_operators {

RowTerms row_terms(const LossRows& rows);
/// For a whole vocabulary: relative to the maximum.
RowTerms whole_terms(const LossRows& rows);
void make_relative(const LossRows& rows, const RowTerms& terms);
void losses_of_terms(const LossRows& rows, const RowTerms& terms, const RowLosses& into);
void logits_gradient(const LossRows& rows, const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                     const at::Tensor& gradient);
/// out = x * factor, in blocks of the type of `factor`: a half type would round it before the
/// product.
void scale(const at::Tensor& x, const at::Tensor& factor, const at::Tensor& out);

}  // namespace tessera::kernels::by_operators

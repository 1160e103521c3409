#include "composed_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels::by_operators {
namespace {

/// Calls `body(first_row, rows)` for blocks of rows small enough that their working copy stays in
/// cache on a CPU and in a modest buffer on a GPU.
template <class Body>
void for_each_row_block(const at::Tensor& matrix, Body&& body) {
  // In fp32: 256 KiB, a CPU core's cache; 256 MiB, little beside the logits on a GPU.
  const bool on_cpu = matrix.is_cpu() && fake_device() == c10::DeviceType::CPU;
  const std::int64_t block_elements = on_cpu ? std::int64_t{1} << 16 : std::int64_t{1} << 26;
  const std::int64_t step =
      std::max<std::int64_t>(1, block_elements / std::max<std::int64_t>(1, matrix.size(1)));
  for (std::int64_t row = 0; row < matrix.size(0); row += step) {
    body(row, std::min(step, matrix.size(0) - row));
  }
}

/// The column of each target in this shard, (rows, 1). Where another shard has the target, the
/// column is any valid one and `is_here`, (rows, 1), is false.
struct TargetColumns {
  explicit TargetColumns(const LossRows& rows)
      : column(rows.targets.sub(rows.first_column).unsqueeze(1)),
        is_here(column.ge(0).bitwise_and_(column.lt(rows.logits.size(1)))) {
    // Because gather and scatter read the column before the mask can hide it.
    column = column.clamp(0, std::max<std::int64_t>(0, rows.logits.size(1) - 1));
  }
  at::Tensor column;
  at::Tensor is_here;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor row_maximum(const at::Tensor& logits) {
  if (logits.size(1) == 0) {
    // amax of an empty dimension throws; minus infinity is the neutral element of the all-reduce.
    return at::full({logits.size(0)}, -kInfinity, logits.options().dtype(loss_type(logits)));
  }
  return logits.amax(1).to(loss_type(logits));
}

/// What exponentials are relative to: without columns, or of -inf alone, no NaN.
at::Tensor reference(const at::Tensor& maximum) {
  return maximum.masked_fill(maximum.eq(-kInfinity), 0);
}

/// What backward multiplies a row's softmax by, and its one-hot target; then adds to each column.
/// All (rows), but the last.
struct RowScales {
  at::Tensor softmax;
  at::Tensor target;
  at::Tensor all;  ///< undefined: nothing
};

RowScales row_scales(const LossRows& rows, const at::Tensor& of_row,
                     const at::Tensor& log_sum_exp) {
  const RowLossOptions& options = rows.options;
  RowScales scales{of_row, of_row.mul(options.label_smoothing - 1), {}};
  if (options.z_loss > 0) {
    scales.softmax =
        of_row.addcmul(of_row, log_sum_exp.to(of_row.scalar_type()), 2 * options.z_loss);
  }
  if (options.label_smoothing > 0) {
    scales.all = of_row.mul(-options.label_smoothing / static_cast<double>(rows.vocabulary));
  }
  return scales;
}

}  // namespace

RowTerms row_terms(const LossRows& rows) {
  const at::Tensor& logits = rows.logits;
  const at::Tensor maximum = row_maximum(logits);
  const bool smooth = rows.options.label_smoothing > 0;
  RowTerms result{maximum, maximum.clone(),
                  at::zeros({smooth ? 3 : 2, logits.size(0)}, maximum.options())};
  if (logits.size(1) == 0) {
    return result;
  }
  const TargetColumns target(rows);
  result.terms[1].copy_(logits.gather(1, target.column).squeeze(1));
  const at::Tensor from = reference(maximum);
  for_each_row_block(logits, [&](std::int64_t row, std::int64_t count) {
    at::Tensor block = logits.narrow(0, row, count)
                           .to(maximum.scalar_type())
                           .sub(from.narrow(0, row, count).unsqueeze(1));
    if (smooth) {
      result.terms[2].narrow(0, row, count).copy_(block.sum(1));
    }
    result.terms[0].narrow(0, row, count).copy_(block.exp_().sum(1));
  });
  return result;
}

RowTerms whole_terms(const LossRows& rows) {
  RowTerms terms = by_operators::row_terms(rows);
  by_operators::make_relative(rows, terms);
  return terms;
}

void make_relative(const LossRows& rows, const RowTerms& terms) {
  const auto& [own, all, sums] = terms;
  sums[0].mul_(own.sub(all).exp_().masked_fill_(own.eq(-kInfinity), 0));
  sums[1].sub_(all).masked_fill_(TargetColumns(rows).is_here.squeeze(1).bitwise_not(), 0);
  if (rows.options.label_smoothing > 0 && rows.logits.size(1) > 0) {
    sums[2].add_(reference(own).sub_(all), static_cast<double>(rows.logits.size(1)));
  }
}

void losses_of_terms(const LossRows& rows, const RowTerms& terms, const RowLosses& into) {
  const RowLossOptions& options = rows.options;
  const at::Tensor log_sum = terms.terms[0].log();
  into.log_sum_exp.copy_(log_sum.to(at::kDouble).add(terms.all_maximum));
  at::Tensor losses = log_sum.sub(terms.terms[1], 1 - options.label_smoothing);
  if (options.label_smoothing > 0) {
    losses.sub_(terms.terms[2], options.label_smoothing / static_cast<double>(rows.vocabulary));
  }
  if (options.z_loss > 0) {
    losses.add_(into.log_sum_exp.square(), options.z_loss);
  }
  into.losses.copy_(losses.masked_fill_(rows.targets.eq(options.ignore_index), 0));
}

void logits_gradient(const LossRows& rows, const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                     const at::Tensor& gradient) {
  const at::Tensor& logits = rows.logits;
  if (logits.size(1) == 0) {
    return;
  }
  const at::Tensor ignored = rows.targets.eq(rows.options.ignore_index);
  const auto type = loss_type(logits);
  const at::Tensor factors =
      of_row.defined() ? of_row : at::full({logits.size(0)}, 1, logits.options().dtype(type));
  const RowScales scales = row_scales(rows, factors.masked_fill(ignored, 0), log_sum_exp);
  const at::Tensor high = log_sum_exp.to(type);
  const at::Tensor low = log_sum_exp.sub(high).to(type).masked_fill_(high.abs().eq(kInfinity), 0);
  const TargetColumns target(rows);
  const at::Tensor at_target = scales.target.unsqueeze(1).mul(target.is_here);
  for_each_row_block(logits, [&](std::int64_t row, std::int64_t count) {
    const auto column = [&](const at::Tensor& values) {
      return values.narrow(0, row, count).unsqueeze(1);
    };
    // A copy, also of the same type: `gradient` may be `logits`.
    at::Tensor block = logits.narrow(0, row, count)
                           .to(type)
                           .sub(column(high))
                           .sub_(column(low))
                           .exp_()
                           .mul_(column(scales.softmax));
    block.scatter_add_(1, target.column.narrow(0, row, count), at_target.narrow(0, row, count));
    if (scales.all.defined()) {
      block.add_(column(scales.all));
    }
    gradient.narrow(0, row, count).copy_(block.masked_fill_(column(ignored), 0));
  });
}

void scale(const at::Tensor& x, const at::Tensor& factor, const at::Tensor& out) {
  for_each_row_block(x, [&](std::int64_t row, std::int64_t count) {
    out.narrow(0, row, count).copy_(x.narrow(0, row, count).to(factor.scalar_type()).mul(factor));
  });
}

}  // namespace tessera::kernels::by_operators

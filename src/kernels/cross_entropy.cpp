#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "device/cross_entropy.h"
#include "device/embedding.h"
#include "fused_dispatch.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/fake_mode.h"

// Cross entropy by ATen operators, for fp64, for meta tensors, and for fp16 on a CPU.
namespace tessera::kernels::by_operators {
namespace {

/// Calls `body(first_row, rows)` for blocks of rows of `matrix`. An fp32 copy of a block stays in a
/// CPU's cache, or takes little memory of a GPU.
template <class Body>
void for_each_row_block(const at::Tensor& matrix, Body&& body) {
  // Elements in a block of rows. In fp32 a block takes 256 KiB (a CPU core's cache) or, on a GPU,
  // 256 MiB (small compared to the logits).
  const bool on_cpu = matrix.is_cpu() && fake_device() == c10::DeviceType::CPU;
  const std::int64_t block_elements = on_cpu ? std::int64_t{1} << 16 : std::int64_t{1} << 26;
  const std::int64_t step =
      std::max<std::int64_t>(1, block_elements / std::max<std::int64_t>(1, matrix.size(1)));
  for (std::int64_t row = 0; row < matrix.size(0); row += step) {
    body(row, std::min(step, matrix.size(0) - row));
  }
}

/// The column of each target in this rank's shard of the vocabulary: (rows, 1). If `is_here` is
/// false, another rank has the target, and `column` is arbitrary but valid.
struct TargetColumns {
  explicit TargetColumns(const LossRows& rows)
      : column(rows.targets.sub(rows.first_column).unsqueeze(1)),
        is_here(column.ge(0).bitwise_and_(column.lt(rows.logits.size(1)))) {
    // gather and scatter need a valid column even if another rank has the target.
    column = column.clamp(0, std::max<std::int64_t>(0, rows.logits.size(1) - 1));
  }
  at::Tensor column;
  at::Tensor is_here;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor row_maximum(const at::Tensor& logits) {
  if (logits.size(1) == 0) {
    // amax of an empty dimension would throw. A rank without columns uses -inf, the neutral element
    // of the all-reduce by maximum.
    return at::full({logits.size(0)}, -kInfinity, logits.options().dtype(loss_type(logits)));
  }
  return logits.amax(1).to(loss_type(logits));
}

/// Returns the number to subtract from logits before exp(): the row's maximum, or 0 if the maximum
/// is -inf (no columns, or only logits of -inf).
at::Tensor reference(const at::Tensor& maximum) {
  return maximum.masked_fill(maximum.eq(-kInfinity), 0);
}

/// Three coefficients per row of logits, each of shape (rows). The gradient of a row is
/// `softmax` * softmax(row) + `target` * one_hot(target) + `all`.
struct RowScales {
  at::Tensor softmax;
  at::Tensor target;
  at::Tensor all;  ///< undefined if the term is 0
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
    // Not sub_(), which would write to `logits` if to() returns a view of `logits`.
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

namespace tessera::kernels {

// Cross entropy by this library's kernels, for a vocabulary that is whole or split between ranks.

namespace {

bool has_dense_rows(const at::Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1;
}

bool has_loss_kernels(const at::Tensor& logits) {
  return has_kernels(logits) && has_dense_rows(logits);
}

Logits call_of(const LossRows& rows, const at::Tensor& targets) {
  return {.data = rows.logits.const_data_ptr(),
          .stride = rows.logits.stride(0),
          .targets = in<std::int64_t>(targets),
          .rows = rows.logits.size(0),
          .columns = rows.logits.size(1),
          .first_column = rows.first_column,
          .vocabulary = rows.vocabulary,
          .ignore_index = rows.options.ignore_index,
          .label_smoothing = static_cast<float>(rows.options.label_smoothing),
          .z_loss = static_cast<float>(rows.options.z_loss)};
}

/// Calls body(kernels, element, value, row) for each row of logits, on several threads. Only the
/// types of `element` (of the row kernels) and `value` (of libtorch) matter.
template <class Body>
void for_rows(const at::Tensor& logits, Body&& body) {
  const std::int64_t grain = std::max<std::int64_t>(1, 16384 / (logits.size(1) + 1));
  with_row_kernels(logits, [&](const auto& kernels, auto element) {
    using T = std::conditional_t<std::is_same_v<decltype(element), Bf16>, c10::BFloat16, float>;
    parallel_for(0, logits.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        body(kernels, element, T(0.0F), row);
      }
    });
  });
}

template <class T>
T* row_of(T* data, std::int64_t row, std::int64_t stride) {
  return data == nullptr ? nullptr : data + row * stride;
}

/// Runs one step of the cross-entropy forward on a CPU, with the row functions of the CUDA kernels.
void run_on_cpu(const CrossEntropy& call, const at::Tensor& logits) {
  const Logits& in = call.logits;
  const bool reads = call.step == CrossEntropyStep::kWhole || call.step == CrossEntropyStep::kTerms;
  for_rows(logits, [&](const auto& kernels, auto element, auto value, std::int64_t row) {
    if (!reads) {
      return finish_row(call, row);
    }
    using T = decltype(element);
    RowSums sums;
    kernels.sums_of_logits(row_of(static_cast<const T*>(in.data), row, in.stride), in.columns,
                           &sums.maximum, &sums.sum,
                           in.label_smoothing > 0 ? &sums.total : nullptr);
    write_sums<decltype(value)>(call, row, sums);
  });
}

void run_on_cpu(const CrossEntropyBackward& call, const at::Tensor& logits) {
  const Logits& in = call.logits;
  for_rows(logits, [&](const auto& kernels, auto element, auto, std::int64_t row) {
    using T = decltype(element);
    T* const out = row_of(static_cast<T*>(call.gradient), row, call.gradient_stride);
    if (in.is_ignored(row)) {
      std::fill(out, out + in.columns, T(0));
      return;
    }
    const RowScales scales = scales_of_row(call, row);
    const T* const x = row_of(static_cast<const T*>(in.data), row, in.stride);
    // The target's logit is read before `gradient` is written: both can be in the same memory.
    const T at_target = in.has_target(row) ? x[in.target(row)] : T(0);
    const auto [high, low] = two_floats(call.log_sum_exp[row]);
    kernels.softmax(x, out, in.columns, high, low, scales.softmax, -scales.all);
    if (in.has_target(row)) {
      kernels.softmax(&at_target, out + in.target(row), 1, high, low, scales.softmax,
                      -scales.all - scales.target);
    }
  });
}

/// Runs a cross-entropy kernel on a GPU or a CPU. In a FakeMode, only reports the call to the
/// observer.
template <class Call>
void run(const Call& call, const at::Tensor& logits, const char* name,
         std::initializer_list<at::Tensor> inputs, std::initializer_list<at::Tensor> results) {
  if (in_fake_mode()) {
    const std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
    observe_fake_call({name, arguments, inputs, results});
  } else if (logits.size(0) > 0 && has_cuda_kernels(logits)) {
    launch_cuda(call, logits);
  } else {
    run_on_cpu(call, logits);
  }
}

}  // namespace

at::ScalarType loss_type(const at::Tensor& logits) {
  return compute_type(logits);
}

RowLosses empty_losses(const at::Tensor& logits) {
  const auto rows = logits.sizes().slice(0, 1);
  return {at::empty(rows, logits.options().dtype(loss_type(logits))),
          at::empty(rows, logits.options().dtype(at::kDouble))};
}

void row_losses(const LossRows& rows, const RowLosses& into) {
  if (!has_loss_kernels(rows.logits)) {
    const RowTerms terms = by_operators::row_terms(rows);
    by_operators::make_relative(rows, terms);
    return by_operators::losses_of_terms(rows, terms, into);
  }
  const at::Tensor targets = rows.targets.contiguous();
  run(CrossEntropy{.step = CrossEntropyStep::kWhole,
                   .logits = call_of(rows, targets),
                   .losses = out<float>(into.losses),
                   .log_sum_exp = out<double>(into.log_sum_exp)},
      rows.logits, "tessera::cross_entropy", {rows.logits, targets},
      {into.losses, into.log_sum_exp});
}

RowTerms row_terms(const LossRows& rows) {
  if (!has_loss_kernels(rows.logits)) {
    return by_operators::row_terms(rows);
  }
  const at::Tensor targets = rows.targets.contiguous();
  const auto type = rows.logits.options().dtype(c10::ScalarType::Float);
  const std::int64_t count = rows.logits.size(0);
  RowTerms result{at::empty({count}, type), at::empty({count}, type),
                  at::empty({rows.options.label_smoothing > 0 ? 3 : 2, count}, type)};
  run(CrossEntropy{.step = CrossEntropyStep::kTerms,
                   .logits = call_of(rows, targets),
                   .maximum = out<float>(result.maximum),
                   .all_maximum = out<float>(result.all_maximum),
                   .terms = out<float>(result.terms)},
      rows.logits, "tessera::cross_entropy", {rows.logits, targets},
      {result.maximum, result.all_maximum, result.terms});
  return result;
}

void make_relative(const LossRows& rows, const RowTerms& terms) {
  if (!has_loss_kernels(rows.logits)) {
    return by_operators::make_relative(rows, terms);
  }
  const at::Tensor targets = rows.targets.contiguous();
  run(CrossEntropy{.step = CrossEntropyStep::kRelative,
                   .logits = call_of(rows, targets),
                   .maximum = out<float>(terms.maximum),
                   .all_maximum = out<float>(terms.all_maximum),
                   .terms = out<float>(terms.terms)},
      rows.logits, "tessera::cross_entropy", {terms.maximum, terms.all_maximum, targets},
      {terms.terms});
}

void losses_of_terms(const LossRows& rows, const RowTerms& terms, const RowLosses& into) {
  if (!has_loss_kernels(rows.logits)) {
    return by_operators::losses_of_terms(rows, terms, into);
  }
  const at::Tensor targets = rows.targets.contiguous();
  run(CrossEntropy{.step = CrossEntropyStep::kLosses,
                   .logits = call_of(rows, targets),
                   .all_maximum = out<float>(terms.all_maximum),
                   .terms = out<float>(terms.terms),
                   .losses = out<float>(into.losses),
                   .log_sum_exp = out<double>(into.log_sum_exp)},
      rows.logits, "tessera::cross_entropy", {terms.all_maximum, terms.terms, targets},
      {into.losses, into.log_sum_exp});
}

void logits_gradient(const LossRows& rows, const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                     const at::Tensor& gradient) {
  if (!has_loss_kernels(rows.logits) || !has_dense_rows(gradient)) {
    return by_operators::logits_gradient(rows, log_sum_exp, of_row, gradient);
  }
  if (rows.logits.size(1) == 0) {
    return;
  }
  const at::Tensor targets = rows.targets.contiguous();
  const at::Tensor sums = log_sum_exp.contiguous();
  run(CrossEntropyBackward{.logits = call_of(rows, targets),
                           .log_sum_exp = in<double>(sums),
                           .of_row = of_row.defined() ? in<float>(of_row) : nullptr,
                           // If losses are summed, `of_row` is an expanded tensor of stride 0,
                           // which the kernel reads without a contiguous copy.
                           .of_row_stride = of_row.defined() ? of_row.stride(0) : 1,
                           .gradient = gradient.mutable_data_ptr(),
                           .gradient_stride = gradient.stride(0)},
      rows.logits, "tessera::cross_entropy_backward", {rows.logits, targets, sums}, {gradient});
}

at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, at::ScalarType type) {
  at::Tensor result = at::empty(tensor.sizes(), tensor.options().dtype(type));
  if (!has_cuda_kernels(result) || !tensor.is_contiguous()) {
    by_operators::scale(tensor, factor, result);
    return result;
  }
  run_cuda_kernel(Scale{.x = tensor.const_data_ptr(),
                        .x_is_float = tensor.scalar_type() == c10::ScalarType::Float,
                        .factor = in<float>(factor),
                        .size = tensor.numel(),
                        .out = result.mutable_data_ptr()},
                  "tessera::scale", {tensor, factor}, {result});
  return result;
}

void assert_indices(const at::Tensor& indices, std::int64_t size, std::int64_t ignored) {
  const at::Tensor flat = indices.contiguous();
  if (flat.numel() > 0) {
    launch_cuda(CheckIndices{.indices = in<std::int64_t>(flat),
                             .count = flat.numel(),
                             .size = size,
                             .ignored = ignored},
                flat);
  }
}

}  // namespace tessera::kernels

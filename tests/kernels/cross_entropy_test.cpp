// Tests cross entropy by CPU kernels, by CUDA kernels and by ATen operators: losses and gradients
// must equal those of libtorch in fp64.
#include "tessera/kernels/detail/cross_entropy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/host_kernels.h"
#include "rows/row_kernels.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kIgnored = -100;

struct Result {
  at::Tensor losses, log_sum_exp, gradient;
};

at::Tensor some_targets(std::int64_t rows, std::int64_t columns) {
  const at::Tensor targets = at::arange(rows, at::kLong).mul(7).add(2).remainder(columns);
  return targets.masked_fill(at::arange(rows).remainder(4).eq(3), kIgnored);
}

Result of_libtorch(const LossRows& rows, const at::Tensor& of_row) {
  const RowLossOptions& options = rows.options;
  const at::Tensor leaf = rows.logits.to(at::kDouble).detach().requires_grad_();
  const at::Tensor sums = leaf.logsumexp(1);
  const at::Tensor squares = sums.square().masked_fill(rows.targets.eq(options.ignore_index), 0);
  const at::Tensor losses = at::cross_entropy_loss(leaf, rows.targets, {}, at::Reduction::None,
                                                   options.ignore_index, options.label_smoothing) +
                            squares * options.z_loss;
  losses.mul(of_row.to(at::kDouble)).sum().backward();
  return {losses.detach(), sums.detach(), leaf.grad()};
}

Result of_kernels(const LossRows& rows, const at::Tensor& of_row) {
  const RowLosses own = empty_losses(rows.logits);
  row_losses(rows, own);
  const at::Tensor gradient = at::empty(rows.logits.sizes(), rows.logits.options());
  logits_gradient(rows, own.log_sum_exp, of_row, gradient);
  return {own.losses, own.log_sum_exp, gradient};
}

/// Computes the losses from shards of the vocabulary. Shard i begins at column first_columns[i].
Result of_parts(const LossRows& rows, const at::Tensor& of_row,
                const std::vector<std::int64_t>& first_columns) {
  std::vector<LossRows> parts;
  std::vector<RowTerms> terms;
  at::Tensor maximum, sums;
  for (std::size_t i = 0; i < first_columns.size(); ++i) {
    const std::int64_t end =
        i + 1 < first_columns.size() ? first_columns[i + 1] : rows.logits.size(1);
    LossRows part = rows;
    part.first_column = first_columns[i];
    part.logits = rows.logits.narrow(1, first_columns[i], end - first_columns[i]);
    parts.push_back(part);
    terms.push_back(row_terms(part));
    const at::Tensor& own = terms.back().all_maximum;
    maximum = maximum.defined() ? at::maximum(maximum, own) : own;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    terms[i].all_maximum.copy_(maximum);
    make_relative(parts[i], terms[i]);
    sums = sums.defined() ? sums + terms[i].terms : terms[i].terms;
  }
  terms.front().terms.copy_(sums);
  const RowLosses all = empty_losses(rows.logits);
  losses_of_terms(parts.front(), terms.front(), all);
  const at::Tensor gradient = at::empty(rows.logits.sizes(), rows.logits.options());
  for (const LossRows& part : parts) {
    logits_gradient(part, all.log_sum_exp, of_row,
                    gradient.narrow(1, part.first_column, part.logits.size(1)));
  }
  return {all.losses, all.log_sum_exp, gradient};
}

void expect_result(const Result& found, const Result& expected, at::ScalarType type) {
  const auto close = [](const at::Tensor& a, const at::Tensor& b, double tolerance) {
    return a.to(at::kDouble).allclose(b, tolerance, tolerance, /*equal_nan=*/true);
  };
  const double sums = type == at::kDouble ? 1e-12 : 4e-6;
  EXPECT_TRUE(close(found.losses, expected.losses, sums)) << found.losses << expected.losses;
  EXPECT_TRUE(close(found.log_sum_exp, expected.log_sum_exp, sums));
  const double rounding = type == at::kBFloat16 ? 4e-3 : type == at::kHalf ? 5e-4 : sums;
  EXPECT_EQ(found.gradient.scalar_type(), type);
  EXPECT_TRUE(close(found.gradient, expected.gradient, rounding));
}

const std::vector<RowLossOptions> kOptions{
    {}, {kIgnored, 0.1, 0}, {kIgnored, 0, 0.01}, {kIgnored, 0.3, 0.02}, {2, 1, 0}};

class CrossEntropy : public EachForm {
 protected:
  static at::Tensor random(at::IntArrayRef sizes, double scale = 1) {
    return at::randn(sizes, at::kDouble).mul(scale).to(type());
  }
  static at::Tensor of_rows(std::int64_t rows) {
    return at::randn({rows}, at::kDouble).to(type() == at::kDouble ? at::kDouble : at::kFloat);
  }
};

TEST_P(CrossEntropy, AgreesWithLibtorchForAnySize) {
  for (const std::int64_t columns : {1, 15, 16, 17, 1000, 1024, 5000}) {
    for (const RowLossOptions& options : kOptions) {
      const at::Tensor targets =
          some_targets(9, columns).masked_fill(at::arange(9).eq(3), options.ignore_index);
      const at::Tensor valid = targets.masked_fill(targets.eq(kIgnored), options.ignore_index);
      const LossRows rows{random({9, columns}, 3), valid, columns, 0, options};
      const at::Tensor of_row = of_rows(9);
      expect_result(of_kernels(rows, of_row), of_libtorch(rows, of_row), type());
    }
  }
}

TEST_P(CrossEntropy, OfPartsAgreesWithTheWhole) {
  for (const RowLossOptions& options : kOptions) {
    const at::Tensor targets =
        some_targets(7, 53).masked_fill(some_targets(7, 53).eq(kIgnored), options.ignore_index);
    const LossRows rows{random({7, 53}, 3), targets, 53, 0, options};
    const at::Tensor of_row = of_rows(7);
    const Result expected = of_libtorch(rows, of_row);
    for (const std::vector<std::int64_t>& first :
         {std::vector<std::int64_t>{0}, {0, 20}, {0, 0, 17}, {0, 9, 9, 52, 53}}) {
      expect_result(of_parts(rows, of_row, first), expected, type());
    }
  }
}

TEST_P(CrossEntropy, SupportsStridedLogits) {
  const at::Tensor targets = some_targets(6, 19), of_row = of_rows(6);
  for (const at::Tensor& logits : {random({6, 40}).narrow(1, 3, 19), random({19, 6}).t(),
                                   random({6, 38}).slice(1, 0, 38, 2)}) {
    const LossRows rows{logits, targets, 19, 0, {kIgnored, 0.1, 0.01}};
    const Result expected = of_libtorch(rows, of_row);
    expect_result(of_kernels(rows, of_row), expected, type());
    const RowLosses own = empty_losses(logits);
    row_losses(rows, own);
    logits_gradient(rows, own.log_sum_exp, of_row, logits);
    expect_result({own.losses, own.log_sum_exp, logits}, expected, type());
  }
}

TEST_P(CrossEntropy, AcceptsMissingAndExpandedFactors) {
  const LossRows rows{random({5, 33}), some_targets(5, 33), 33, 0, {}};
  const at::Tensor ones = at::ones({5}, of_rows(1).options());
  const Result expected = of_libtorch(rows, ones);
  expect_result(of_kernels(rows, {}), expected, type());
  expect_result(of_kernels(rows, ones[0].expand({5})), expected, type());
}

/// Adding a large number to all logits of a row must not reduce the precision.
TEST_P(CrossEntropy, StaysAccurateForLargeOffsets) {
  for (const double offset : {-3e4, 1e3, 5e4}) {
    const at::Tensor logits = random({6, 300}, 3).to(at::kDouble).add(offset).to(type());
    const LossRows rows{logits, some_targets(6, 300), 300, 0, {kIgnored, 0.1, 0}};
    const at::Tensor of_row = of_rows(6);
    const Result expected = of_libtorch(rows, of_row);
    expect_result(of_kernels(rows, of_row), expected, type());
    expect_result(of_parts(rows, of_row, {0, 8, 130}), expected, type());
  }
}

TEST_P(CrossEntropy, FollowsTheFormulaForInfinityAndNaN) {
  at::Tensor logits = random({6, 40});
  logits[0].slice(0, 0, 35).fill_(-INFINITY);
  logits[1].fill_(-INFINITY);
  logits[2][5] = NAN;
  logits[4][39] = INFINITY;
  const at::Tensor targets = some_targets(6, 40);
  targets[0] = 37;
  const LossRows rows{logits, targets, 40, 0, {}};
  for (const Result& found :
       {of_kernels(rows, of_rows(6)), of_parts(rows, of_rows(6), {0, 8, 30})}) {
    EXPECT_EQ(found.losses.isfinite().to(at::kLong).sum().item<std::int64_t>(), 3);
    EXPECT_TRUE(found.losses[0].isfinite().item<bool>());
    EXPECT_EQ(found.losses[3].item<double>(), 0);
    EXPECT_EQ(found.gradient[0].slice(0, 0, 35).abs().max().item<double>(), 0);
    EXPECT_TRUE(found.gradient[2].isnan().all().item<bool>());
    EXPECT_TRUE(found.gradient[5].isfinite().all().item<bool>());
  }
}

TEST_P(CrossEntropy, GivesIgnoredRowsNoGradient) {
  const LossRows rows{at::full({3, 20}, NAN, type()),
                      at::full({3}, kIgnored, at::kLong),
                      20,
                      0,
                      {kIgnored, 0.1, 0.1}};
  const Result found = of_kernels(rows, of_rows(3));
  EXPECT_EQ(found.losses.abs().max().item<double>(), 0);
  EXPECT_EQ(found.gradient.abs().max().item<double>(), 0);
}

TEST_P(CrossEntropy, AcceptsZeroRows) {
  const LossRows rows{random({0, 8}), some_targets(0, 8), 8, 0, {}};
  EXPECT_EQ(of_kernels(rows, of_rows(0)).gradient.numel(), 0);
}

TEST_P(CrossEntropy, ScalesInTheDtypeOfTheFactor) {
  const at::Tensor x = random({7, 30});
  const at::Tensor factor = of_rows(1)[0];
  const at::Tensor exact = x.to(at::kDouble) * factor.to(at::kDouble);
  EXPECT_TRUE(scaled(x, factor, type())
                  .to(at::kDouble)
                  .allclose(exact.to(type()).to(at::kDouble), 1e-6, 0));
  const at::Tensor sums = x.to(factor.scalar_type());
  EXPECT_EQ(scaled(sums, factor, type()).scalar_type(), type());
}

TEST_P(CrossEntropy, OfHugeLogitsDoesNotOverflow) {
  const at::Tensor logits = random({6, 40}, type() == at::kHalf ? 1e3 : 5e36);
  const LossRows rows{logits, some_targets(6, 40), 40, 0, {}};
  const at::Tensor of_row = of_rows(6);
  const Result expected = of_libtorch(rows, of_row);
  expect_result(of_kernels(rows, of_row), expected, type());
  expect_result(of_parts(rows, of_row, {0, 13}), expected, type());
}

INSTANTIATE_EACH_FORM(CrossEntropy);

TEST(RowKernels, OfLogitsAgreeBetweenInstructionSets) {
  const at::Tensor x = at::randn({5003}) * 5;
  const auto run = [&](const RowKernelTable& table) {
    at::Tensor out = at::zeros({5006});
    auto* to = out.data_ptr<float>();
    table.fp32.sums_of_logits(x.const_data_ptr<float>(), 5003, to, to + 1, to + 2);
    table.fp32.softmax(x.const_data_ptr<float>(), to + 3, 5003, to[0], 0.25F, 0.5F, 0.1F);
    return out;
  };
  EXPECT_TRUE(run(row_kernels()).equal(run(baseline::kTable)));
}

}  // namespace
}  // namespace tessera::kernels

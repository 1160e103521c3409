// Compares AdamW updates of lists of tensors with the formula in fp64. The updates are computed by
// CPU kernels, and by the bodies of the CUDA kernels.
#include "tessera/kernels/detail/lists.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "device/adamw.h"
#include "kernels/host_kernels.h"

namespace tessera::kernels {
namespace {

static_assert(sizeof(AdamW) <= 4096, "the arguments fit a launch");

at::Tensor number(double value, at::ScalarType type = at::kDouble) {
  return at::full({}, value, type);
}

/// If `size` is odd, the tensors are unaligned: they begin at element 1 of a larger tensor.
AdamWTensors update_of(std::int64_t size, at::ScalarType moments) {
  const auto part = [size](const at::Tensor& x) { return x.narrow(0, size % 2, size); };
  return {.parameter = part(at::randn({size + 1})),
          .gradient = part(at::randn({size + 1})),
          .exp_avg = part(at::randn({size + 1}).mul(0.1).to(moments)),
          .exp_avg_sq = part(at::randn({size + 1}).mul(0.1).abs().to(moments)),
          .step = number(7, at::kFloat),
          .place = GlobalPlace::whole({size}),
          .local_sizes = {size},
          .stream = 11};
}

template <class Take>
AdamWTensors copied(const AdamWTensors& update, const Take& take) {
  AdamWTensors copy = update;
  for (at::Tensor* tensor : {&copy.parameter, &copy.gradient, &copy.exp_avg, &copy.exp_avg_sq}) {
    *tensor = take(*tensor).clone(at::MemoryFormat::Contiguous);
  }
  return copy;
}

AdamWTensors copied(const AdamWTensors& update) {
  return copied(update, [](const at::Tensor& x) { return x; });
}

AdamWNumbers numbers_of(double factor = 0.25, std::uint64_t seed = 5) {
  return {.beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .seed = seed,
          .lr = number(1e-2),
          .gradient_factor = number(factor)};
}

void expect_near(const at::Tensor& found, const at::Tensor& exact, const at::Tensor& terms,
                 double relative) {
  const at::Tensor difference = (found.to(at::kDouble) - exact).abs();
  EXPECT_TRUE(difference.le(terms.abs().mul(relative)).all().item<bool>()) << difference << terms;
}

/// Compares `after` with the formula of one AdamW step from `before`, computed in fp64.
void expect_updated(const AdamWTensors& before, const AdamWTensors& after) {
  const at::Tensor gradient = before.gradient.to(at::kDouble) * 0.25;
  const at::Tensor parameter = before.parameter.to(at::kDouble);
  const at::Tensor old_mean = before.exp_avg.to(at::kDouble);
  const at::Tensor mean = old_mean * 0.9 + gradient * 0.1;
  const at::Tensor square = before.exp_avg_sq.to(at::kDouble) * 0.95 + gradient.square() * 0.05;
  const at::Tensor root = square.sqrt() / std::sqrt(1 - std::pow(0.95, 7)) + 1e-8;
  const at::Tensor change = mean * (1e-2 / (1 - std::pow(0.9, 7))) / root;
  expect_near(after.parameter, parameter * (1 - 1e-2 * 0.1) - change,
              parameter.abs() + change.abs(), 1e-6);
  if (before.exp_avg.scalar_type() == at::kFloat) {
    expect_near(after.exp_avg, mean, old_mean.abs() + gradient.abs(), 1e-6);
    expect_near(after.exp_avg_sq, square, square, 1e-6);
  } else {
    // Moments in bf16 are rounded stochastically. Each error is below one unit in the last place.
    expect_near(after.exp_avg, mean, mean.abs() + 1e-5, 1.01 * 0x1p-7);
    expect_near(after.exp_avg_sq, square, square, 1.01 * 0x1p-7);
  }
}

void expect_equal(const AdamWTensors& found, const AdamWTensors& expected) {
  EXPECT_TRUE(found.parameter.equal(expected.parameter));
  EXPECT_TRUE(found.exp_avg.equal(expected.exp_avg));
  EXPECT_TRUE(found.exp_avg_sq.equal(expected.exp_avg_sq));
}

class AdamWUpdate : public EachForm {};
INSTANTIATE_TEST_SUITE_P(Moments, AdamWUpdate,
                         ::testing::Values(KernelForm{at::kFloat}, KernelForm{at::kBFloat16},
                                           KernelForm{at::kFloat, true},
                                           KernelForm{at::kBFloat16, true}));

TEST_P(AdamWUpdate, MatchesTheFormulaForAnySizes) {
  std::vector<AdamWTensors> before, after;
  for (const std::int64_t size : {0, 1, 7, 8, 9, 1000, 16385}) {
    after.push_back(update_of(size, type()));
  }
  // With 60 more tensors, the CUDA kernel must be launched more than once.
  for (int i = 0; i < 60; ++i) {
    after.push_back(update_of(4, type()));
  }
  for (const AdamWTensors& each : after) {
    before.push_back(copied(each));
  }
  adamw(after, numbers_of());
  for (std::size_t i = 0; i < after.size(); ++i) {
    expect_updated(before[i], after[i]);
  }
}

TEST_P(AdamWUpdate, KeepsNaNAndInfinities) {
  const AdamWTensors update = update_of(9, type());
  update.gradient[0].fill_(NAN);
  update.gradient[8].fill_(INFINITY);
  adamw({update}, numbers_of());
  EXPECT_TRUE(update.parameter[0].isnan().item<bool>());
  EXPECT_TRUE(update.exp_avg[0].isnan().item<bool>());
  EXPECT_TRUE(update.exp_avg_sq[0].isnan().item<bool>());
  EXPECT_TRUE(update.exp_avg[8].isinf().item<bool>());
  EXPECT_TRUE(update.exp_avg_sq[8].isinf().item<bool>());
}

/// A NaN or infinite gradient makes `gradient_factor` NaN or infinite. The update must do nothing.
TEST_P(AdamWUpdate, ChangesNothingForANonfiniteFactor) {
  for (const double factor : {std::nan(""), HUGE_VAL}) {
    AdamWTensors update = update_of(1000, type());
    update.step = number(0, at::kFloat);
    update.gradient[3].fill_(NAN);
    const AdamWTensors before = copied(update);
    adamw({update}, numbers_of(factor));
    expect_equal(update, before);
  }
}

TEST_P(AdamWUpdate, KeepsZeros) {
  const AdamWTensors update =
      copied(update_of(9, type()), [](const at::Tensor& x) { return at::zeros_like(x); });
  adamw({update}, numbers_of());
  expect_equal(update, copied(update, [](const at::Tensor& x) { return at::zeros_like(x); }));
}

/// An element's random number depends on its index in the whole tensor. Updates of unaligned row
/// shards, or of a column shard, must therefore equal those of the whole tensor.
TEST_P(AdamWUpdate, RoundsByGlobalElementIndex) {
  const AdamWTensors before = update_of(60, type());
  const auto rows = [&](std::int64_t begin, std::int64_t size) {
    AdamWTensors part =
        copied(before, [&](const at::Tensor& x) { return x.narrow(0, begin, size); });
    part.place = {{Box{{begin}, {0}, {size}}}, {60}, 0};
    part.local_sizes = {size};
    return part;
  };
  const auto columns_of = [](const at::Tensor& x) { return x.view({4, 15}).narrow(1, 5, 10); };
  AdamWTensors columns = copied(before, columns_of);
  columns.place = {{Box{{0, 5}, {0, 0}, {4, 10}}}, {4, 15}, 0};
  columns.local_sizes = {4, 10};
  const AdamWTensors whole = copied(before), first = rows(0, 13), second = rows(13, 47);
  for (const std::vector<AdamWTensors>& each :
       {std::vector{whole}, std::vector{second, first}, std::vector{columns}}) {
    adamw(each, numbers_of());
  }
  expect_equal(first, copied(whole, [](const at::Tensor& x) { return x.narrow(0, 0, 13); }));
  expect_equal(second, copied(whole, [](const at::Tensor& x) { return x.narrow(0, 13, 47); }));
  expect_equal(columns, copied(whole, columns_of));
}

TEST(AdamWRounding, DiffersByStepStreamAndSeed) {
  at::manual_seed(0);
  const AdamWTensors before = update_of(4096, at::kBFloat16);
  // The gradients of all calls are equal, so only random numbers can change exp_avg_sq.
  const auto squares = [&](double step, std::uint64_t stream, std::uint64_t seed) {
    AdamWTensors update = copied(before);
    update.step = number(step, at::kFloat);
    update.stream = stream;
    adamw({update}, numbers_of(0.25, seed));
    return update.exp_avg_sq;
  };
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) {
    return a.eq(b).sum().item<std::int64_t>();
  };
  const at::Tensor one = squares(7, 0, 5);
  EXPECT_EQ(equal(one, squares(7, 0, 5)), 4096);
  // With independent random numbers, rounding gives different values in a third of the elements.
  EXPECT_LT(equal(one, squares(8, 0, 5)), 3500);
  EXPECT_LT(equal(one, squares(7, 1, 5)), 3500);
  EXPECT_LT(equal(one, squares(7, 0, 6)), 3500);
}

/// The mean of many stochastic roundings of x must be x, within 5 standard deviations.
TEST(AdamWRounding, IsUnbiased) {
  constexpr int kDraws = 100000;
  for (const float x : {1.0F, 1.001F, -1.0035F, 3.3e-20F, 0x1.01p-130F, 1e30F}) {
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) {
      const PhiloxBlock bits = bits_of_four({3, 4}, static_cast<std::uint64_t>(i));
      sum += static_cast<double>(rounded_at_random(x, bits.words[i % 4])) / x;
    }
    const double ulp = std::exp2(std::max(std::ilogb(x), -126) - 7);
    const double spread = ulp / std::abs(x) / 2;
    EXPECT_NEAR(sum / kDraws, 1.0, 5 * spread / std::sqrt(kDraws)) << x;
  }
}

TEST(AdamWPower, AgreesWithStdPow) {
  for (const std::int64_t n : {0, 1, 2, 3, 10, 1000, 100000}) {
    const double exact = std::pow(0.999, static_cast<double>(n));
    EXPECT_NEAR(power(0.999, n), exact, 1e-12 * exact) << n;
  }
}

}  // namespace
}  // namespace tessera::kernels

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/kernels/detail/philox.h"
#include "tessera/kernels/detail/portable_math.h"
#include "tessera/kernels/detail/random.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "testing/errors.h"

namespace tessera::kernels {
namespace {

constexpr PhiloxKey kKey{42, 7};

at::Tensor filled(std::vector<std::int64_t> sizes, const Distribution& distribution,
                  at::ScalarType type = at::kDouble, PhiloxKey key = kKey) {
  const at::Tensor tensor = at::empty(sizes, type);
  fill_random(tensor, GlobalPlace::whole(sizes), distribution, key);
  return tensor;
}

std::uint64_t hash(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  std::uint64_t h = 14695981039346656037ULL;
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
    h = (h ^ bytes[i]) * 1099511628211ULL;
  }
  return h;
}

/// Returns the largest distance of u's distribution from the uniform one (Kolmogorov-Smirnov).
double kolmogorov_smirnov(const at::Tensor& u) {
  const at::Tensor sorted = std::get<0>(u.flatten().sort());
  const at::Tensor steps = at::arange(sorted.numel(), at::kDouble) / sorted.numel();
  return (sorted - steps).abs().max().item<double>();
}

// Numbers for a seed must be equal in all versions, on all machines and with all compilers.
TEST(FillRandom, MatchesGoldenValues) {
  EXPECT_EQ(hash(filled({1000}, Uniform{0.0, 1.0})), 7441446161175867775ULL);
  EXPECT_EQ(hash(filled({1000}, Normal{0.0, 1.0})), 12025635758652365889ULL);
  EXPECT_EQ(hash(filled({1000}, truncated_normal(0.0, 0.02, -0.04, 0.04), at::kFloat)),
            11701563407040774907ULL);
  EXPECT_EQ(hash(filled({1000}, Normal{0.0, 1.0}, at::kBFloat16)), 10930817780915677472ULL);
  EXPECT_EQ(hash(filled({1000}, Normal{0.0, 1.0}, at::kHalf)), 1693982787322251257ULL);
}

TEST(FillRandom, PassesKolmogorovSmirnov) {
  const double bound = 1.95 / std::sqrt(200'000.0);  // 0.1 % of random samples exceed this bound
  EXPECT_LT(kolmogorov_smirnov(filled({200'000}, Uniform{0.0, 1.0})), bound);
  EXPECT_LT(kolmogorov_smirnov(at::special_ndtr((filled({200'000}, Normal{3.0, 2.0}) - 3.0) / 2.0)),
            bound);
  const at::Tensor x = filled({200'000}, truncated_normal(1.0, 2.0, 0.0, 6.0));
  const auto phi = [](double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); };
  const at::Tensor u = (at::special_ndtr((x - 1.0) / 2.0) - phi(-0.5)) / (phi(2.5) - phi(-0.5));
  EXPECT_LT(kolmogorov_smirnov(u), bound);
}

TEST(FillRandom, TruncatedNormalStaysWithinExtremeBounds) {
  for (const auto& [low, high] : {std::pair{-9.0, -8.0}, {8.0, 9.0}, {30.0, 31.0}}) {
    const at::Tensor x = filled({1000}, truncated_normal(0.0, 1.0, low, high));
    EXPECT_GE(x.min().item<double>(), low);
    EXPECT_LE(x.max().item<double>(), high);
    EXPECT_GT(std::get<0>(at::_unique(x)).numel(), 990);
  }
}

TEST(FillRandom, BernoulliHasTheGivenProbability) {
  const at::Tensor x = filled({400'000}, Bernoulli{0.3});
  EXPECT_NEAR(x.mean().item<double>(), 0.3, 4 * std::sqrt(0.21 / 400'000.0));
  EXPECT_TRUE(((x == 0) | (x == 1)).all().item<bool>());
}

TEST(FillRandom, StreamsAndSeedsAreIndependent) {
  const at::Tensor a = filled({50'000}, Normal{0, 1});
  const at::Tensor b = filled({50'000}, Normal{0, 1}, at::kDouble, {42, 8});
  const at::Tensor c = filled({50'000}, Normal{0, 1}, at::kDouble, {43, 7});
  EXPECT_LT(std::fabs((a * b).mean().item<double>()), 4 / std::sqrt(50'000.0));
  EXPECT_LT(std::fabs((a * c).mean().item<double>()), 4 / std::sqrt(50'000.0));
}

// Random numbers of a narrower type must be the fp64 random numbers, rounded to nearest once.
TEST(FillRandom, RoundsOnceToNarrowTypes) {
  const at::Tensor exact = filled({100'000}, Normal{0.0, 1.0});
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor rounded = filled({100'000}, Normal{0.0, 1.0}, type);
    const at::Tensor error = (rounded.to(at::kDouble) - exact).abs();
    const at::Tensor bits = rounded.view(type == at::kFloat ? at::kInt : at::kShort);
    for (const int step : {-1, 1}) {
      const at::Tensor neighbour = (bits + step).to(bits.scalar_type()).view(type).to(at::kDouble);
      EXPECT_TRUE((error <= (neighbour - exact).abs()).all().item<bool>()) << type << step;
    }
  }
}

TEST(FillRandom, PartsEqualTheWhole) {
  const at::Tensor whole = filled({7, 5, 3}, Normal{0, 1});
  const at::Tensor part = at::empty({4, 2, 3}, at::kDouble);
  fill_random(part, {{Box{{2, 3, 0}, {0, 0, 0}, {4, 2, 3}}}, {7, 5, 3}, 0}, Normal{0, 1}, kKey);
  EXPECT_TRUE(part.equal(whole.slice(0, 2, 6).slice(1, 3, 5)));
  // The local tensor `some` is two Boxes (blocks) of the global tensor `rows`.
  const at::Tensor rows = filled({8, 3}, Normal{0, 1}), some = at::empty({4, 3}, at::kDouble);
  const GlobalPlace place{{Box{{6, 0}, {2, 0}, {2, 3}}, Box{{1, 0}, {0, 0}, {2, 3}}}, {8, 3}, 0};
  fill_random(some, place, Normal{0, 1}, kKey);
  EXPECT_TRUE(some.equal(at::cat({rows.slice(0, 1, 3), rows.slice(0, 6, 8)})));
}

TEST(FillRandom, SupportsStridedTensors) {
  const at::Tensor whole = filled({6, 4}, Normal{0, 1});
  const at::Tensor strided = at::zeros({4, 12}, at::kDouble).t().slice(0, 0, 12, 2);
  fill_random(strided, GlobalPlace::whole({6, 4}), Normal{0, 1}, kKey);
  EXPECT_TRUE(strided.equal(whole));
}

TEST(FillRandom, SupportsScalarsAndEmptyTensors) {
  const at::Tensor scalar = at::empty({}, at::kDouble);
  fill_random(scalar, GlobalPlace::whole({}), Normal{0, 1}, kKey);
  EXPECT_EQ(scalar.item<double>(), filled({3}, Normal{0, 1})[0].item<double>());
  fill_random(at::empty({0, 3}), GlobalPlace::whole({0, 3}), Normal{0, 1}, kKey);
}

TEST(FillRandom, DoesNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(4);
  const at::Tensor many = filled({300, 101}, Normal{0, 1});
  at::set_num_threads(1);
  const at::Tensor one = filled({300, 101}, Normal{0, 1});
  at::set_num_threads(threads);
  EXPECT_TRUE(many.equal(one));
}

TEST(FillRandom, RefusesInvalidCalls) {
  EXPECT_ERROR(filled({3}, Normal{0, 1}, at::kLong), "of a Long tensor is not supported");
  EXPECT_ERROR(truncated_normal(0.0, 1.0, 50.0, 60.0), "has probability 0 between 50 and 60");
  EXPECT_ERROR(truncated_normal(0.0, 1.0, 1.0, -1.0), "bounds are 1 and -1");
  EXPECT_ERROR(truncated_normal(0.0, -1.0, -1.0, 1.0), "std is -1");
}

TEST(Dropout, ScalesTheRemainingElements) {
  const at::Tensor x = at::arange(1, 10'001, at::kDouble);
  const at::Tensor y = dropout(x, GlobalPlace::whole({10'000}), 0.25, kKey);
  const at::Tensor kept = filled({10'000}, Uniform{0.0, 1.0}) >= 0.25;
  EXPECT_TRUE(y.allclose(x * kept / 0.75, 1e-15));
}

std::array<std::uint32_t, 4> words(const PhiloxBlock& block) {
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

// Known answers of Random123 (kat_vectors, philox4x32 10) for zeros, ones and the digits of pi.
TEST(Philox, HasKnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  const std::uint32_t f = 0xffffffff;
  EXPECT_EQ(words(philox4x32_10({{0, 0, 0, 0}}, 0, 0)),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(philox4x32_10({{f, f, f, f}}, f, f)),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  const PhiloxBlock pi{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
  EXPECT_EQ(words(philox4x32_10(pi, 0xa4093822, 0x299f31d0)),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(UniformAt, IsStrictlyBetweenZeroAndOne) {
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    const double u = uniform_at(1, 2, i);
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
  }
}

double relative_error(double found, long double expected) {
  return static_cast<double>(std::fabs((found - expected) / expected));
}

TEST(NormalCdf, AgreesWithErfc) {
  EXPECT_EQ(normal_cdf(-100.0), 0.0);
  EXPECT_EQ(normal_cdf(100.0), 1.0);
  for (double x = -37.0; x < 9.0; x += 0.0917) {
    const long double expected = std::erfc(-static_cast<long double>(x) / std::sqrt(2.0L)) / 2;
    EXPECT_LT(relative_error(normal_cdf(x), expected), 2e-13) << x;
  }
}

// Computes p back from x = normal_quantile(p). A relative error e of x changes p by x^2 e.
TEST(NormalQuantile, InvertsErfcAndIsOdd) {
  for (double p = 1e-300; p < 0.5; p *= 1.21) {
    const long double x = normal_quantile(p);
    const long double back = std::erfc(-x / std::sqrt(2.0L)) / 2;
    const double allowed = 1e-15 * static_cast<double>(x * x + 1.0L);
    EXPECT_LT(relative_error(p, back), allowed) << p;
  }
  for (double p = 0.5; p > 1e-3; p -= 1.0 / 1024) {
    EXPECT_EQ(normal_quantile(p), -normal_quantile(1.0 - p)) << p;
  }
}

using OptionalTensor = std::optional<at::Tensor>;

/// Returns arguments of several schema types: tensors with the values 1 to 4, number 7, None.
std::vector<c10::IValue> values() {
  const auto tensor = [](int value) { return at::full({}, value); };
  return {tensor(1), 7, at::Tensor(), c10::List<at::Tensor>({tensor(2), at::Tensor(), tensor(3)}),
          c10::List<OptionalTensor>({std::nullopt, OptionalTensor(tensor(4))})};
}

std::vector<double> numbers_in(const std::vector<c10::IValue>& all) {
  std::vector<double> numbers;
  visit_tensors(all, [&](const at::Tensor& tensor) { numbers.push_back(tensor.item<double>()); });
  return numbers;
}

TEST(TensorsInValues, AreVisitedInOrderAndReplaced) {
  EXPECT_EQ(numbers_in(values()), (std::vector<double>{1, 2, 3, 4}));
  std::vector<c10::IValue> replaced;
  for (const c10::IValue& value : values()) {
    replaced.push_back(with_tensors(value, [](const at::Tensor& tensor) { return tensor.mul(2); }));
  }
  EXPECT_EQ(numbers_in(replaced), (std::vector<double>{2, 4, 6, 8}));
  EXPECT_EQ(replaced[1].toInt(), 7);
  EXPECT_FALSE(replaced[2].toTensor().defined());
  EXPECT_FALSE(replaced[3].toTensorVector()[1].defined());
  EXPECT_FALSE(replaced[4].toOptionalTensorVector()[0].has_value());
}

}  // namespace
}  // namespace tessera::kernels

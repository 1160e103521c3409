#include "device/adamw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tessera/kernels/detail/philox.h"

namespace tessera::kernels {
namespace {

/// `size` normal numbers times `scale`, rounded to T.
template <class T>
std::vector<T> normals(std::int64_t size, double scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<T> values(static_cast<std::size_t>(size));
  std::ranges::generate(values, [&] { return static_cast<T>(static_cast<float>(normal(engine))); });
  return values;
}

/// The distance of numbers of T about `exact`.
template <class T>
double ulp(double exact) {
  using Limits = std::numeric_limits<T>;
  const int exponent = exact == 0 ? Limits::min_exponent : std::ilogb(exact) + 1;
  return std::ldexp(1.0, std::max(exponent, Limits::min_exponent) - Limits::digits);
}

/// `exact` rounded once is within half an ulp; fp32 arithmetic adds some of its own ulps, of the
/// result or, where terms cancel, of `terms`.
template <class T>
void expect_rounded_once(T found, double exact, double terms = 0) {
  const double largest = std::numeric_limits<T>::max();
  const double value = static_cast<float>(found);
  if (std::isnan(exact)) {
    EXPECT_TRUE(std::isnan(value)) << value;
  } else if (std::abs(exact) > largest) {
    EXPECT_GE(std::copysign(1.0, exact) * value, largest) << exact;
  } else {
    const double arithmetic = 8 * ulp<float>(std::max(std::abs(exact), terms));
    EXPECT_LE(std::abs(value - exact), 0.5 * ulp<T>(exact) + arithmetic) << value << " " << exact;
  }
}

/// Tensors of one update, moments of type M, and the numbers on the "device".
template <class M>
struct Update {
  explicit Update(std::int64_t size)
      : parameter(normals<float>(size, 1, 1)),
        gradient(normals<float>(size, 1, 2)),
        mean(normals<M>(size, 0.1, 3)),
        square(normals<M>(size, 0.1, 4)) {
    for (M& each : square) {
      each = static_cast<M>(std::abs(static_cast<float>(each)));
    }
  }

  AdamWPiece piece(std::int64_t skip = 0) {
    return {.parameter = parameter.data() + skip,
            .gradient = gradient.data() + skip,
            .exp_avg = mean.data() + skip,
            .exp_avg_sq = square.data() + skip,
            .step = &step,
            .rows = 1,
            .size = static_cast<std::int64_t>(parameter.size()) - skip};
  }

  /// All chunks, three threads each.
  void run(std::vector<AdamWPiece> pieces) {
    AdamW call{};
    call.lr = &lr;
    call.gradient_factor = &factor;
    call.beta1 = 0.9;
    call.beta2 = 0.95;
    call.eps = 1e-8;
    call.weight_decay = 0.1;
    call.seed = seed;
    for (const AdamWPiece& each : pieces) {
      ASSERT_TRUE(call.list.add(each));
    }
    for (std::int32_t number = 0; number < call.list.chunks; ++number) {
      const Chunk chunk = chunk_of(call.list, number);
      const AdamWPiece& each = call.list.pieces[chunk.piece];
      for (int thread = 0; thread < 3; ++thread) {
        adamw_chunk<M>(each, factors_of(call, each), chunk, thread, 3);
      }
    }
  }

  std::vector<float> parameter, gradient;
  std::vector<M> mean, square;
  float step = 7;
  double lr = 1e-2, factor = 0.25;
  std::uint64_t seed = 5;
};

/// The update of one element in fp64.
struct Exact {
  Exact(double p, double g, double m, double v, double lr, double factor, int step) {
    g *= factor;
    mean = 0.9 * m + 0.1 * g;
    square = 0.95 * v + 0.05 * g * g;
    const double rate = lr / (1 - std::pow(0.9, step));
    const double root = std::sqrt(square) / std::sqrt(1 - std::pow(0.95, step)) + 1e-8;
    term = rate * mean / root;
    parameter = p * (1 - lr * 0.1) - term;
  }
  double parameter, mean, square, term;
};

template <class M>
void expect_exact(const Update<M>& before, const Update<M>& after, std::size_t i) {
  const Exact exact(before.parameter[i], before.gradient[i], static_cast<float>(before.mean[i]),
                    static_cast<float>(before.square[i]), before.lr, before.factor,
                    static_cast<int>(before.step));
  const double terms = std::abs(before.parameter[i]) + std::abs(exact.term);
  expect_rounded_once(after.parameter[i], exact.parameter, terms);
  if constexpr (sizeof(M) == 4) {
    expect_rounded_once(after.mean[i], exact.mean,
                        std::abs(before.mean[i]) + std::abs(before.gradient[i]));
    expect_rounded_once(after.square[i], exact.square);
  } else {
    // Up or down, so by less than one.
    EXPECT_LT(std::abs(static_cast<float>(after.mean[i]) - exact.mean), 1.01 * ulp<M>(exact.mean));
    EXPECT_LT(std::abs(static_cast<float>(after.square[i]) - exact.square),
              1.01 * ulp<M>(exact.square));
  }
}

template <class M>
class AdamWOnDevice : public ::testing::Test {};
using Moments = ::testing::Types<float, c10::BFloat16>;
TYPED_TEST_SUITE(AdamWOnDevice, Moments);

TYPED_TEST(AdamWOnDevice, IsRoundedOnceForAnySize) {
  for (const std::int64_t size : {1, 7, 8, 9, 1000, 16385}) {
    const Update<TypeParam> before(size);
    Update<TypeParam> after = before;
    after.run({after.piece()});
    for (std::size_t i = 0; i < before.parameter.size(); ++i) {
      expect_exact(before, after, i);
    }
  }
}

TYPED_TEST(AdamWOnDevice, TakesMisalignedInput) {
  const Update<TypeParam> before(38);
  Update<TypeParam> after = before;
  after.run({after.piece(/*skip=*/1)});
  EXPECT_EQ(after.parameter[0], before.parameter[0]);
  for (std::size_t i = 1; i < 38; ++i) {
    expect_exact(before, after, i);
  }
}

TYPED_TEST(AdamWOnDevice, KeepsNaNAndInfinities) {
  Update<TypeParam> update(9);
  update.gradient[0] = std::numeric_limits<float>::quiet_NaN();
  update.gradient[8] = std::numeric_limits<float>::infinity();
  update.run({update.piece()});
  EXPECT_TRUE(std::isnan(update.parameter[0]));
  EXPECT_TRUE(std::isnan(static_cast<float>(update.mean[0])));
  EXPECT_TRUE(std::isnan(static_cast<float>(update.square[0])));
  EXPECT_TRUE(std::isinf(static_cast<float>(update.mean[8])));
  EXPECT_TRUE(std::isinf(static_cast<float>(update.square[8])));
}

/// The factor of a step whose gradients are not finite.
TYPED_TEST(AdamWOnDevice, ChangesNothingByAFactorThatIsNotFinite) {
  const Update<TypeParam> before(1000);
  for (const double factor : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Update<TypeParam> after = before;
    after.factor = factor;
    after.step = 0;  // the first step, which has not been counted
    after.gradient[3] = std::numeric_limits<float>::quiet_NaN();
    after.run({after.piece(), after.piece(/*skip=*/1)});
    for (std::size_t i = 0; i < before.parameter.size(); ++i) {
      ASSERT_EQ(after.parameter[i], before.parameter[i]);
      ASSERT_EQ(static_cast<float>(after.mean[i]), static_cast<float>(before.mean[i]));
      ASSERT_EQ(static_cast<float>(after.square[i]), static_cast<float>(before.square[i]));
    }
  }
}

TYPED_TEST(AdamWOnDevice, ZerosStayZeros) {
  Update<TypeParam> update(9);
  update.parameter.assign(9, 0.0F);
  update.gradient.assign(9, 0.0F);
  update.mean.assign(9, TypeParam(0.0F));
  update.square.assign(9, TypeParam(0.0F));
  update.run({update.piece()});
  EXPECT_EQ(update.parameter, std::vector<float>(9, 0.0F));
  EXPECT_EQ(static_cast<float>(update.square[8]), 0.0F);
}

TEST(AdamWOnDevice, ArgumentsFitALaunch) {
  EXPECT_LE(sizeof(AdamW), 4096U);
}

TEST(AdamWPower, IsThatOfTheLibrary) {
  for (const std::int64_t n : {0, 1, 2, 3, 10, 1000, 100000}) {
    const double exact = std::pow(0.999, static_cast<double>(n));
    EXPECT_NEAR(power(0.999, n), exact, 1e-12 * exact) << n;
  }
}

/// The same elements in one piece, in two that begin where no vector does, and as rows of a wider
/// tensor: every random number is the element's.
TEST(AdamWRounding, DependsOnTheElementAlone) {
  const Update<c10::BFloat16> before(60);
  Update<c10::BFloat16> whole = before;
  whole.run({whole.piece()});

  Update<c10::BFloat16> parts = before;
  AdamWPiece first = parts.piece();
  first.size = 13;
  AdamWPiece second = parts.piece(/*skip=*/13);
  second.place = 13;
  parts.run({second, first});

  // Columns 5 to 15 of each of 4 rows of 15.
  Update<c10::BFloat16> columns(40);
  for (std::size_t i = 0; i < 40; ++i) {
    const std::size_t at = i / 10 * 15 + 5 + i % 10;
    columns.parameter[i] = before.parameter[at];
    columns.gradient[i] = before.gradient[at];
    columns.mean[i] = before.mean[at];
    columns.square[i] = before.square[at];
  }
  AdamWPiece rows = columns.piece();
  rows.rows = 4;
  rows.size = 10;
  rows.stride = 15;
  rows.place = 5;
  columns.run({rows});

  for (std::size_t i = 0; i < 60; ++i) {
    ASSERT_EQ(parts.mean[i].x, whole.mean[i].x) << i;
    ASSERT_EQ(parts.square[i].x, whole.square[i].x) << i;
  }
  for (std::size_t i = 0; i < 40; ++i) {
    const std::size_t at = i / 10 * 15 + 5 + i % 10;
    ASSERT_EQ(columns.mean[i].x, whole.mean[at].x) << i;
    ASSERT_EQ(columns.square[i].x, whole.square[at].x) << i;
  }
}

TEST(AdamWRounding, DiffersByStepStreamAndSeed) {
  const Update<c10::BFloat16> before(4096);
  const auto equal_squares = [&](auto&& change) {
    Update<c10::BFloat16> one = before;
    Update<c10::BFloat16> other = before;
    // Results that do not depend on the step or the rate but by the random numbers.
    AdamWPiece piece = other.piece();
    change(other, piece);
    one.run({one.piece()});
    other.run({piece});
    int equal = 0;
    for (std::size_t i = 0; i < 4096; ++i) {
      equal += one.square[i].x == other.square[i].x ? 1 : 0;
    }
    return equal;
  };
  EXPECT_EQ(equal_squares([](auto&, auto&) {}), 4096);
  // A third of all pairs of independent roundings differ.
  EXPECT_LT(equal_squares([](auto& update, auto&) { update.step = 8; }), 3500);
  EXPECT_LT(equal_squares([](auto& update, auto&) { update.seed = 6; }), 3500);
  EXPECT_LT(equal_squares([](auto&, auto& piece) { piece.stream = 1; }), 3500);
}

/// The mean over many roundings is the number itself: 5 standard deviations of the mean.
TEST(AdamWRounding, IsRightInTheMean) {
  constexpr int kDraws = 100000;
  for (const float x : {1.0F, 1.001F, -1.0035F, 3.3e-20F, 0x1.01p-130F, 1e30F}) {
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) {
      const PhiloxBlock bits = bits_of_four({3, 4}, static_cast<std::uint64_t>(i));
      sum += static_cast<double>(rounded_at_random(x, bits.words[i % 4])) / x;
    }
    const double spread = ulp<c10::BFloat16>(x) / std::abs(x) / 2;
    EXPECT_NEAR(sum / kDraws, 1.0, 5 * spread / std::sqrt(kDraws)) << x;
  }
}

TEST(AdamWRounding, GivesNeighboursAlone) {
  const float x = 1.003F;
  for (std::uint32_t random = 0; random < 0x10000U; random += 7) {
    const float rounded = rounded_at_random(x, random);
    EXPECT_EQ(rounded, static_cast<float>(c10::BFloat16(rounded)));
    EXPECT_LT(std::abs(rounded - x), 0x1p-7F);
  }
  EXPECT_EQ(rounded_at_random(1.5F, 0xFFFFU), 1.5F);
}

}  // namespace
}  // namespace tessera::kernels

#include "tessera/data/batch_loader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "testing/errors.h"

namespace tessera::data {
namespace {

/// Tokens 0, 1, 2, ..., so that a token is its position.
TokenSourcePtr Positions(std::int64_t count) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  return make_token_source(std::move(tokens));
}

TEST(BatchLoader, TargetsAreInputsOneTokenLater) {
  const BatchLoader loader(Positions(13), 2, 3, 100);
  const auto batch = loader.load(1, 0, 2);
  EXPECT_TRUE(at::equal(batch.inputs, at::arange(6, 12).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.targets, at::arange(7, 13).view({2, 3})));
}

TEST(BatchLoader, CountsSamplesWithTheirLastTarget) {
  EXPECT_EQ(BatchLoader(Positions(12), 1, 3, 100).samples(), 3);  // the 4th lacks its last target
  EXPECT_EQ(BatchLoader(Positions(13), 1, 3, 100).samples(), 4);
}

TEST(BatchLoader, WrapsAroundInTheMiddleOfABatch) {
  const BatchLoader loader(Positions(11), 2, 2, 100);  // 5 samples
  const auto batch = loader.load(2, 0, 2);             // samples 4 and 5 = 0
  EXPECT_TRUE(at::equal(batch.inputs[0], at::arange(8, 10)));
  EXPECT_TRUE(at::equal(batch.inputs[1], at::arange(0, 2)));
}

TEST(BatchLoader, RowsOfTheRanksMakeUpTheBatch) {
  const BatchLoader loader(Positions(100), 6, 4, 100);
  const auto whole = loader.load(3, 0, 6);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const auto part = loader.load(3, rank * 2, rank * 2 + 2);
    EXPECT_TRUE(at::equal(part.inputs, whole.inputs.slice(0, rank * 2, rank * 2 + 2)));
    EXPECT_TRUE(at::equal(part.targets, whole.targets.slice(0, rank * 2, rank * 2 + 2)));
  }
}

TEST(BatchLoader, GivesNoRowsForAnEmptyRange) {
  const auto batch = BatchLoader(Positions(9), 2, 4, 100).load(0, 1, 1);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{0, 4}));
}

TEST(BatchLoader, RefusesFewerSamplesThanABatch) {
  EXPECT_THAT_ERROR(BatchLoader(Positions(12), 4, 3, 100), "fewer than the batch of 4");
  EXPECT_THAT_ERROR(BatchLoader(Positions(0), 1, 3, 100), "0 tokens");
}

TEST(BatchLoader, NamesTheTokenOutsideTheVocabulary) {
  EXPECT_THAT_ERROR(BatchLoader(make_token_source({1, 2, 3, 9, 1, 1, 1}), 2, 3, 9),
                    "token 9 at position 3");
  EXPECT_THAT_ERROR(BatchLoader(make_token_source({-1, 0}), 1, 1, 9), "token -1");
}

/// 2^26 good tokens and then one that is not, without the memory for them.
class LateFault : public TokenSource {
 public:
  std::int64_t size() const override { return kGood + 9; }
  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = begin + static_cast<std::int64_t>(i) < kGood ? 1 : 50;
    }
  }
  static constexpr std::int64_t kGood = std::int64_t{1} << 26;
};

TEST(BatchLoader, ChecksWhatLiesFarOutWhenItIsRead) {
  const BatchLoader loader(std::make_shared<LateFault>(), 1, 8, 9);
  EXPECT_THAT_ERROR(loader.load(LateFault::kGood / 8, 0, 1), "token 50 at position 67108864");
}

TEST(BatchLoader, RefusesRowsOutsideTheBatch) {
  const BatchLoader loader(Positions(13), 2, 3, 100);
  EXPECT_THAT_ERROR(loader.load(0, 0, 3), "rows [0, 3)");
  EXPECT_THAT_ERROR(loader.load(-1, 0, 1), "step -1");
}

}  // namespace
}  // namespace tessera::data

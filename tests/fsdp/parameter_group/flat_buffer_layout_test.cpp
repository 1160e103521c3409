// Sizes, types and places of a group: no rank and no memory is needed.
#include "fsdp/buffers.h"

#include <gtest/gtest.h>

namespace tessera::fsdp {
namespace {

const ShardHome kOnCpu{c10::kCPU};
const ShardHome kPinned{c10::kCPU, /*pinned=*/true};

FlatBufferLayout layout_of(const std::vector<ShardShape>& shapes,
                           const MixedPrecisionPolicy& policy = {},
                           const ShardHome& home = kOnCpu) {
  return {shapes, at::kFloat, policy, home, c10::kCPU};
}

TEST(FlatBufferLayout, PutsPaddedShardsOneAfterAnotherAligned) {
  // 5 rows over 3 ranks: 2, 2, 1; 4 columns: 2, 2, none.
  const FlatBufferLayout layout =
      layout_of({{{5, 3}, 0, 3}, {{2, 4}, 1, 3}, {{}, std::nullopt, 3}});
  ASSERT_EQ(layout.segments().size(), 3u);
  EXPECT_EQ(layout.segments()[0].offset, 0);
  // 6, 4 and 1 elements, each from a multiple of 16 on: 64 bytes.
  EXPECT_EQ(layout.segments()[1].offset, 16);
  EXPECT_EQ(layout.segments()[2].offset, 16 + 16);
  EXPECT_EQ(flat_numel(layout.segments()), 16 + 16 + 16);
  EXPECT_EQ(layout.ranks(), 3);
  EXPECT_FALSE(layout.splits_rows());
  EXPECT_TRUE(layout_of({{{5, 3}, 0, 3}, {{2}, 0, 3}}).splits_rows());
}

TEST(FlatBufferLayout, AlignsInTheNarrowerOfTheTypesOfShardsAndGathers) {
  const FlatBufferLayout layout =
      layout_of({{{12}, 0, 2}, {{12}, 0, 2}}, {.param_dtype = at::kBFloat16});
  EXPECT_EQ(layout.segments()[1].offset, 32);
  EXPECT_EQ(flat_numel(layout.segments()), 64);
}

TEST(FlatBufferLayout, LeavesNoGapsBetweenShardsOfWholeUnits) {
  const std::vector<Segment> segments = segments_of({{{64, 3}, 0, 2}, {{64}, 0, 2}}, at::kHalf);
  EXPECT_EQ(segments[1].offset, 32 * 3);
  EXPECT_EQ(flat_numel(segments), 32 * 3 + 32);
}

TEST(FlatBufferLayout, ComputesAndReducesInTheTypesOfThePolicy) {
  const auto types_of = [](c10::ScalarType dtype, const MixedPrecisionPolicy& policy) {
    const FlatBufferLayout layout({{{4}, 0, 2}}, dtype, policy, kOnCpu, c10::kCPU);
    return std::pair(layout.compute_dtype(), layout.reduce_dtype());
  };
  using Types = std::pair<c10::ScalarType, c10::ScalarType>;
  EXPECT_EQ(types_of(at::kFloat, {}), (Types{at::kFloat, at::kFloat}));
  EXPECT_EQ(types_of(at::kFloat, {.param_dtype = at::kHalf}), (Types{at::kHalf, at::kHalf}));
  EXPECT_EQ(types_of(at::kFloat, {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}),
            (Types{at::kHalf, at::kFloat}));
  EXPECT_EQ(types_of(at::kLong, {.param_dtype = at::kHalf}).first, at::kLong);
}

TEST(FlatBufferLayout, SharesMemoryWhereOneRankComputesWithItsShards) {
  const std::vector<ShardShape> alone{{{4}, 0, 1}};
  EXPECT_TRUE(layout_of(alone).shares_memory());
  EXPECT_FALSE(layout_of(alone).has_flat());
  EXPECT_FALSE(layout_of(alone, {.param_dtype = at::kBFloat16}).shares_memory());
  EXPECT_TRUE(layout_of(alone, {}, kPinned).has_flat());
  const std::vector<ShardShape> shared{{{4}, 0, 2}};
  EXPECT_FALSE(layout_of(shared).shares_memory());
  EXPECT_TRUE(layout_of(shared).has_flat());
}

}  // namespace
}  // namespace tessera::fsdp

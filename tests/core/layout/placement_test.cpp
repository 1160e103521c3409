#include "tessera/core/placement.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera {
namespace {

TEST(Placement, PrintsAsPyTorchDoes) {
  EXPECT_EQ(to_string(Placement(Shard{1})), "Shard(1)");
  EXPECT_EQ(to_string(Placement(Replicate{})), "Replicate()");
  EXPECT_EQ(to_string(Placement(Partial{})), "Partial(sum)");
  EXPECT_EQ(to_string(Placement(StridedShard{0, 2})), "_StridedShard(dim=0, sf=2)");
  EXPECT_EQ(to_string(Placements{Shard{0}, Replicate{}}), "[Shard(0), Replicate()]");
}

TEST(Placement, StreamsWhatItPrints) {
  EXPECT_EQ(detail::concat(ReduceOp::kMax, " ", Placement(Shard{1}), " ",
                           Placements{Shard{0}, Replicate{}}),
            "max Shard(1) [Shard(0), Replicate()]");
}

TEST(Placement, ParsesWhatItPrints) {
  for (const Placement& placement :
       {Placement(Shard{3}), Placement(Shard{-1}), Placement(Replicate{}),
        Placement(Partial{ReduceOp::kAvg}), Placement(Partial{ReduceOp::kProduct}),
        Placement(StridedShard{2, 6})}) {
    EXPECT_EQ(parse_placement(to_string(placement)), placement);
  }
}

TEST(Placement, ParsesShortForms) {
  EXPECT_EQ(parse_placement("R"), Placement(Replicate{}));
  EXPECT_EQ(parse_placement("P"), Placement(Partial{}));
  EXPECT_EQ(parse_placement("P(max)"), Placement(Partial{ReduceOp::kMax}));
  EXPECT_EQ(parse_placement("Partial()"), Placement(Partial{}));
  EXPECT_EQ(parse_placement("S(2)"), Placement(Shard{2}));
  EXPECT_EQ(parse_placement(" Shard( dim = -1 ) "), Placement(Shard{-1}));
  EXPECT_EQ(parse_placement("_StridedShard(1, split_factor=4)"), Placement(StridedShard{1, 4}));
}

TEST(Placement, RefusesOtherText) {
  for (const char* text :
       {"", "(", ")", "S", "Shard", "Shard()", "Shard(x)", "Shard(1", "Shard(0)x", "Replicate(1)",
        "Partial(band)", "Shard(99999999999999999999)", "_StridedShard(0)",
        "_StridedShard(dim=0, sf=0)", "shard(0)"}) {
    EXPECT_ERROR(parse_placement(text), "is not understood") << text;
  }
}

TEST(Placement, TellsKindsApart) {
  EXPECT_TRUE(is_shard(Shard{1}, 1));
  EXPECT_FALSE(is_shard(Shard{1}, 0));
  EXPECT_FALSE(is_shard(StridedShard{1, 2}));
  EXPECT_TRUE(is_partial(Partial{ReduceOp::kMin}));
  EXPECT_TRUE(is_replicate(Placement{}));
}

}  // namespace
}  // namespace tessera

#include "tessera/core/redistribute_plan.h"

#include <gtest/gtest.h>

#include "core/layout/oracle.h"
#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::Indices;

std::string name(const Step& step) {
  std::string mesh_dims;
  for (const int m : step.mesh_dims) {
    mesh_dims += "m" + std::to_string(m);
  }
  const auto dim = std::to_string(step.dim);
  switch (step.kind) {
    case StepKind::kAllGather:
      return "all-gather " + dim + " " + mesh_dims;
    case StepKind::kReduceScatter:
      return "reduce-scatter " + dim + " " + mesh_dims;
    case StepKind::kAllReduce:
      return "all-reduce " + mesh_dims;
    case StepKind::kAllToAll:
      return "all-to-all " + dim + ">" + std::to_string(step.to_dim) + " " + mesh_dims;
    case StepKind::kSlice:
      return "slice " + dim + " " + mesh_dims;
    case StepKind::kMakePartial:
      return "make-partial " + mesh_dims;
    case StepKind::kRelabel:
      return "relabel";
  }
  return "?";
}

using Names = std::vector<std::string>;

/// The steps for a float tensor of 64 x 32 x 16, which every mesh here divides.
Names steps(const Indices& mesh, const Placements& from, const Placements& to) {
  const Indices sizes{64, 32, 16};
  Names out;
  for (const auto& step :
       plan_redistribution(to_layout(mesh, from, sizes), to_layout(mesh, to, sizes), sizes, 4)
           .steps) {
    out.push_back(name(step));
  }
  return out;
}

const Placement R = Replicate{};
const Placement S0 = Shard{0};
const Placement S1 = Shard{1};
const Placement S2 = Shard{2};
const Placement P = Partial{};
const Placement Max = Partial{ReduceOp::kMax};

TEST(RedistributePlan, OneMeshDimension) {
  EXPECT_EQ(steps({4}, {S0}, {S0}), Names{});
  EXPECT_EQ(steps({4}, {S0}, {R}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({4}, {S0}, {S1}), Names{"all-to-all 0>1 m0"});
  EXPECT_EQ(steps({4}, {R}, {S1}), Names{"slice 1 m0"});
  EXPECT_EQ(steps({4}, {P}, {R}), Names{"all-reduce m0"});
  EXPECT_EQ(steps({4}, {P}, {S1}), Names{"reduce-scatter 1 m0"});
  EXPECT_EQ(steps({4}, {R}, {P}), Names{"make-partial m0"});
  EXPECT_EQ(steps({4}, {P}, {P}), Names{});
}

TEST(RedistributePlan, AShardBecomesPartialThroughTheWholeTensor) {
  EXPECT_EQ(steps({4}, {S0}, {P}), (Names{"all-gather 0 m0", "make-partial m0"}));
}

TEST(RedistributePlan, AnotherReductionGoesThroughTheValue) {
  EXPECT_EQ(steps({4}, {P}, {Max}), (Names{"all-reduce m0", "make-partial m0"}));
}

TEST(RedistributePlan, SeveralMeshDimensionsAreOneCollective) {
  EXPECT_EQ(steps({2, 2}, {S0, S0}, {R, R}), Names{"all-gather 0 m0m1"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {R, R}), Names{"all-reduce m0m1"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {S1, S1}), Names{"reduce-scatter 1 m0m1"});
  EXPECT_EQ(steps({2, 2}, {S0, S0}, {S1, S1}), Names{"all-to-all 0>1 m0m1"});
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {R, R, R}), Names{"all-gather 0 m0m1m2"});
  EXPECT_EQ(steps({2, 2, 2}, {S0, S0, S0}, {S0, R, R}), Names{"all-gather 0 m1m2"});
}

TEST(RedistributePlan, UnlikeReductionsAreSeparateInnerFirst) {
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, R}), (Names{"all-reduce m1", "all-reduce m0"}));
  EXPECT_EQ(steps({2, 2}, {P, Max}, {R, Max}),
            (Names{"all-reduce m1", "all-reduce m0", "make-partial m1"}));
}

TEST(RedistributePlan, ReducesTheShardAndNotTheWhole) {
  EXPECT_EQ(steps({2, 2}, {P, P}, {S0, R}), (Names{"reduce-scatter 0 m0", "all-reduce m1"}));
  EXPECT_EQ(steps({2, 2}, {P, R}, {R, S0}), (Names{"slice 0 m1", "all-reduce m0"}));
}

TEST(RedistributePlan, UnevenShardsAreGatheredOneMeshDimensionAtATime) {
  const Indices sizes{7};
  const auto from = to_layout({2, 2}, {S0, S0}, sizes);
  const auto plan = plan_redistribution(from, Layout::replicated({2, 2}, 1), sizes, 4);
  ASSERT_EQ(plan.steps.size(), 2U);
  EXPECT_EQ(name(plan.steps[0]), "all-gather 0 m1");
  EXPECT_EQ(name(plan.steps[1]), "all-gather 0 m0");
}

TEST(RedistributePlan, FsdpOverTensorParallel) {
  const Placement dp = StridedShard{0, 2};  // FSDP's dimension, applied after tp
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, S0}), Names{"all-gather 0 m0"});
  EXPECT_EQ(steps({2, 2}, {P, S0}, {dp, S0}), Names{"reduce-scatter 0 m0"});
  EXPECT_EQ(steps({2, 2}, {dp, S0}, {R, R}), Names{"all-gather 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {P, P}, {dp, S0}), Names{"reduce-scatter 0 m1m0"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {R, S1}), Names{"all-gather 0 m0"});
}

TEST(RedistributePlan, ExchangingTwoShardsParksOneInTheThirdDimension) {
  EXPECT_EQ(steps({8, 8}, {S0, S1}, {S1, S0}).size(), 3U);
}

TEST(RedistributePlan, SequenceParallelBoundaries) {
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, R}), Names{"all-gather 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, P}, {S0, S1}), Names{"reduce-scatter 1 m1"});
  EXPECT_EQ(steps({2, 2}, {S0, S1}, {S0, S2}), Names{"all-to-all 1>2 m1"});
}

TEST(RedistributePlan, MeshDimensionsOfSizeOneMoveNothing) {
  EXPECT_EQ(steps({1}, {S0}, {R}), Names{"relabel"});
  EXPECT_EQ(steps({1}, {P}, {S0}), Names{"relabel"});
  EXPECT_EQ(steps({1, 2}, {S0, S0}, {S0, R}), (Names{"relabel", "all-gather 0 m1", "relabel"}));
}

TEST(RedistributePlan, ALocalDigitInFrontStaysWhileTheShardIsGathered) {
  const Indices sizes{12};
  const auto from = Layout::intern({2}, {{{3, {}}, {4, {0}}}});
  const auto whole = Layout::replicated({2}, 1);
  const auto gather = plan_redistribution(from, whole, sizes, 4);
  ASSERT_EQ(gather.steps.size(), 1U);
  EXPECT_EQ(name(gather.steps[0]), "all-gather 0 m0");
  const auto slice = plan_redistribution(whole, from, sizes, 4);
  ASSERT_EQ(slice.steps.size(), 1U);
  EXPECT_EQ(name(slice.steps[0]), "slice 0 m0");
  EXPECT_EQ(slice.steps[0].to, from);
}

struct BytesCase {
  Indices mesh;
  Placements from;
  Placements to;
  Indices sizes;
  std::int64_t bytes;
};

TEST(RedistributePlan, CountsTheBytesThatOneRankSends) {
  const BytesCase cases[] = {
      {{4}, {S0}, {R}, {8, 4}, 3 * 8 * 4},            // its 8 elements to 3 others
      {{4}, {S0}, {R}, {7, 4}, 3 * 8 * 4},            // the largest shard decides
      {{4}, {P}, {S0}, {8, 4}, 24 * 4},               // all but its own quarter
      {{4}, {P}, {R}, {8, 4}, 48 * 4},                // scatter, then gather
      {{4}, {S0}, {S1}, {8, 4}, 6 * 4},               // of its 8 elements it keeps 2
      {{2, 2}, {S0, S0}, {R, R}, {8, 4}, 3 * 8 * 4},  // flattened: the same as on 4
      {{4}, {R}, {S0}, {8, 4}, 0},
      {{4}, {S0}, {R}, {0, 4}, 0},
  };
  for (const auto& c : cases) {
    const auto plan = plan_redistribution(to_layout(c.mesh, c.from, c.sizes),
                                          to_layout(c.mesh, c.to, c.sizes), c.sizes, 4);
    EXPECT_EQ(plan.bytes(), c.bytes) << to_string(plan);
  }
}

TEST(RedistributePlan, CostIsLatencyAndBytes) {
  const Indices sizes{8, 4};
  const CostModel model{.latency_us = 7, .bytes_per_us = 2};
  const auto plan =
      plan_redistribution(to_layout({4}, {S0}, sizes), Layout::replicated({4}, 2), sizes, 4, model);
  EXPECT_DOUBLE_EQ(plan.cost_us, 7 + 96 / 2.0);
}

TEST(RedistributePlan, Prints) {
  const Indices sizes{8};
  const auto plan =
      plan_redistribution(to_layout({4}, {P}, sizes), to_layout({4}, {S0}, sizes), sizes, 4);
  EXPECT_EQ(to_string(plan),
            "reduce-scatter dim 0 over m0, 24 bytes: [-] partial{m0:sum} -> [m0]\n");
}

TEST(RedistributePlan, RefusesOtherMeshesAndRanks) {
  const auto a = Layout::replicated({2}, 1);
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({4}, 1), Indices{4}, 4),
               "is between different meshes");
  EXPECT_ERROR(plan_redistribution(a, Layout::replicated({2}, 2), Indices{4}, 4),
               "is of a tensor with 1 dimensions");
  EXPECT_ERROR(plan_redistribution(a, a, Indices{4, 4}, 4), "is of a tensor with 2 dimensions");
}

}  // namespace
}  // namespace tessera

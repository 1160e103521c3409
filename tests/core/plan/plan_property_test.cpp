// Random redistributions: every plan arrives, with the right values, by steps that are legal.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/layout/oracle.h"
#include "core/rules/simulated_world.h"
#include "tessera/core/redistribute_plan.h"
#include "testing/random_layout.h"

namespace tessera {
namespace {

using testing::Indices;
using testing::SimulatedWorld;

struct DrawnPlan {
  Indices mesh;
  Indices sizes;
  LayoutPtr from;
  LayoutPtr to;
};

DrawnPlan random_case(unsigned seed) {
  const std::vector<ReduceOp> all{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin,
                                  ReduceOp::kProduct};
  std::mt19937 engine(seed);
  DrawnPlan c;
  c.mesh = testing::random_sizes(engine, 1 + engine() % 3, {1, 2, 2, 3, 4});
  c.sizes = testing::random_sizes(engine, engine() % 4, {0, 1, 2, 5, 6, 7, 8});
  const auto ops = engine() % 3 == 0 ? all : std::vector{all[engine() % all.size()]};
  c.from = testing::random_layout(engine, c.mesh, c.sizes, ops);
  c.to = testing::random_layout(engine, c.mesh, c.sizes, ops);
  return c;
}

/// What Step promises of `mesh_dims`: none of size 1, and the last of the digit in its order.
void expect_well_formed(const Step& step) {
  if (step.kind == StepKind::kAllReduce) {
    EXPECT_TRUE(std::is_sorted(step.mesh_dims.begin(), step.mesh_dims.end()));
  }
  EXPECT_EQ(step.mesh_dims.empty(), step.kind == StepKind::kRelabel);
  for (const int m : step.mesh_dims) {
    EXPECT_GT(step.from->mesh_sizes()[static_cast<std::size_t>(m)], 1);
  }
  const auto is_tail = [&](const std::vector<Digit>& digits) {
    return std::any_of(digits.begin(), digits.end(), [&](const Digit& digit) {
      return digit.mesh_dims.size() >= step.mesh_dims.size() &&
             std::equal(step.mesh_dims.rbegin(), step.mesh_dims.rend(), digit.mesh_dims.rbegin());
    });
  };
  const bool leaves = step.kind == StepKind::kAllGather || step.kind == StepKind::kAllToAll;
  const bool lands = step.kind == StepKind::kReduceScatter || step.kind == StepKind::kSlice;
  EXPECT_TRUE(!leaves || is_tail(step.from->digits(step.dim)));
  EXPECT_TRUE(!lands || is_tail(step.to->digits(step.dim)));
  EXPECT_TRUE(step.kind != StepKind::kAllToAll || is_tail(step.to->digits(step.to_dim)));
}

std::string describe(const DrawnPlan& c, const RedistributionPlan& plan) {
  std::string out = to_string(*c.from) + " to " + to_string(*c.to) + " of";
  for (const auto size : c.sizes) {
    out += " " + std::to_string(size);
  }
  out += " on";
  for (const auto size : c.mesh) {
    out += " " + std::to_string(size);
  }
  return out + "\n" + to_string(plan);
}

void check(const DrawnPlan& c, const CostModel& model) {
  const auto plan = plan_redistribution(c.from, c.to, c.sizes, 4, model);
  SCOPED_TRACE(describe(c, plan));
  SimulatedWorld world(c.from, c.sizes);
  for (const auto& step : plan.steps) {
    expect_well_formed(step);
    EXPECT_LE(world.most_sent(step) * 4, step.bytes);
    ASSERT_NO_FATAL_FAILURE(world.run(step));
  }
  world.expect_correct(c.to);
}

// Under sanitizers each takes 25 ms.
#ifdef TESSERA_SANITIZED
constexpr unsigned kCases = 400;
#else
constexpr unsigned kCases = 3000;
#endif

TEST(PlanProperty, RandomPlansArriveWhereLatencyCounts) {
  for (unsigned seed = 0; seed < kCases && !::testing::Test::HasFailure(); ++seed) {
    check(random_case(seed), {});
  }
}

TEST(PlanProperty, RandomPlansArriveWhereBytesCount) {
  for (unsigned seed = 10000; seed < 10000 + kCases && !::testing::Test::HasFailure(); ++seed) {
    check(random_case(seed), {.latency_us = 0.001, .bytes_per_us = 1});
  }
}

TEST(PlanProperty, IsTheSamePlanEveryTime) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const auto c = random_case(seed);
    EXPECT_EQ(to_string(plan_redistribution(c.from, c.to, c.sizes, 4)),
              to_string(plan_redistribution(c.from, c.to, c.sizes, 4)));
  }
}

/// A flattened group cuts as one mesh dimension of the product would: its members' blocks, in the
/// order of their ranks, are the blocks of torch.chunk.
TEST(PlanProperty, FlattenedGroupsCutLikeOneMeshDimension) {
  int merged = 0;
  for (unsigned seed = 20000; seed < 24000; ++seed) {
    const auto c = random_case(seed);
    for (const auto& step : plan_redistribution(c.from, c.to, c.sizes, 4).steps) {
      if (step.kind != StepKind::kAllGather || step.mesh_dims.size() < 2) {
        continue;
      }
      if (step.from->digits(step.dim).size() != 1) {
        continue;
      }
      ++merged;
      const auto size = c.sizes[static_cast<std::size_t>(step.dim)];
      Indices group_mesh;
      for (const int m : step.mesh_dims) {
        group_mesh.push_back(c.mesh[static_cast<std::size_t>(m)]);
      }
      std::int64_t rank = 0;
      for (const auto& member : testing::coordinates(group_mesh)) {
        Indices at(c.mesh.size(), 0);
        for (std::size_t i = 0; i < member.size(); ++i) {
          at[static_cast<std::size_t>(step.mesh_dims[i])] = member[i];
        }
        const auto whole = testing::layout_indices(*step.to, step.dim, size, at);
        const auto parts = static_cast<std::int64_t>(testing::coordinates(group_mesh).size());
        EXPECT_EQ(testing::layout_indices(*step.from, step.dim, size, at),
                  testing::chunk(whole, parts, rank++));
      }
    }
  }
  EXPECT_GT(merged, 30);
}

}  // namespace
}  // namespace tessera

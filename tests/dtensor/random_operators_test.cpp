// at::'s random operators on distributed tensors: the same seed gives the same global tensor on
// every mesh.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <ostream>

#include "tessera/comm/trace.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/policy.h"
#include "testing/debug_checks.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

struct Case {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> draw;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

const std::vector<std::int64_t> kSizes{7, 5};

at::Tensor draw(const Case& c, const DeviceMesh& mesh, const Placements& placements) {
  manual_seed(7);
  const at::Tensor x = distribute_tensor(at::full(kSizes, 0.5), mesh, placements);
  c.draw(x);
  return DistributedTensor(c.draw(x)).full_tensor();
}

class RandomOperators : public ::testing::TestWithParam<Case> {};

TEST_P(RandomOperators, DrawTheSameOnEveryMesh) {
  const auto& c = GetParam();
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) { expected = draw(c, rank.mesh({1}, {"x"}), {Replicate{}}); });
  EXPECT_GT(std::get<0>(at::_unique(expected)).numel(), 1);
  RunRanks(4, [&](Rank& rank) {
    const auto line = rank.mesh({4}, {"x"});
    EXPECT_TRUE(at::equal(draw(c, line, {Shard{0}}), expected));
    EXPECT_TRUE(at::equal(draw(c, line, {Shard{1}}), expected));
    EXPECT_TRUE(at::equal(draw(c, line, {Partial{}}), expected));
    const auto square = rank.mesh({2, 2}, {"a", "b"});
    EXPECT_TRUE(at::equal(draw(c, square, {Shard{0}, Shard{0}}), expected));
    EXPECT_TRUE(at::equal(draw(c, square, {Replicate{}, Shard{1}}), expected));
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, RandomOperators,
    ::testing::Values(
        Case{"uniform", [](const at::Tensor& x) { return x.clone().uniform_(-1, 1); }},
        Case{"normal", [](const at::Tensor& x) { return x.clone().normal_(2, 3); }},
        Case{"bernoulli", [](const at::Tensor& x) { return x.clone().bernoulli_(0.3); }},
        Case{"bernoulli_of_tensor", [](const at::Tensor& x) { return at::bernoulli(x); }},
        Case{"exponential", [](const at::Tensor& x) { return x.clone().exponential_(); }},
        Case{"rand_like", [](const at::Tensor& x) { return at::rand_like(x); }},
        Case{"randn_like", [](const at::Tensor& x) { return at::randn_like(x); }},
        Case{"randint_like", [](const at::Tensor& x) { return at::randint_like(x, 100); }},
        Case{"dropout", [](const at::Tensor& x) { return at::dropout(x, 0.3, true); }},
        Case{"native_dropout",
             [](const at::Tensor& x) { return std::get<0>(at::native_dropout(x, 0.3, true)); }},
        Case{"multinomial", [](const at::Tensor& x) { return at::multinomial(x, 3); }}),
    [](const auto& info) { return info.param.name; });

TEST(RandomOperators, MoveNothingWhereElementsCanBeDrawnAlone) {
  const testing::DebugChecks none("0");
  RunRanks(4, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros(kSizes), rank.mesh({4}, {"x"}), {Shard{0}});
    at::rand_like(x);
    at::dropout(x, 0.5, true);
    x.normal_();
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, 0);
  });
}

/// What docs/operators.md lists as random.
TEST(RandomOperators, OfTheListRunInAStrictScope) {
  const testing::DebugChecks none("0");
  RunRanks(4, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::ones(kSizes), rank.mesh({4}, {"x"}), {Shard{0}});
    const StrictScope strict;
    at::native_dropout(x, 0.5, true);
    at::rand_like(x);
    at::randn_like(x);
    at::normal_functional(x, 0, 1);
    x.bernoulli_(0.5);
    x.normal_();
    x.uniform_();
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, 0);
  });
}

TEST(NativeDropout, DropsAlikeOnEveryMeshInBothDirections) {
  const auto run = [](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(5);
    const at::Tensor x = distribute_tensor(at::full(kSizes, 3.0), mesh, placements)
                             .tensor()
                             .detach()
                             .requires_grad_();
    const StrictScope strict;
    const auto [y, kept] = at::native_dropout(x, 0.25, true);
    y.sum().backward();
    EXPECT_EQ(kept.scalar_type(), at::kBool);
    return std::array{DistributedTensor(y).full_tensor(), DistributedTensor(kept).full_tensor(),
                      DistributedTensor(x.grad()).full_tensor()};
  };
  RunRanks(4, [&](Rank& rank) {
    const auto line = rank.mesh({4}, {"x"});
    const auto [whole, kept, gradient] = run(line, {Replicate{}});
    EXPECT_TRUE(at::allclose(whole, kept.to(at::kFloat).mul(4)));
    EXPECT_TRUE(at::allclose(gradient, kept.to(at::kFloat).div(0.75)));
    EXPECT_TRUE(kept.any().item<bool>() && !kept.all().item<bool>());
    for (const auto& placement : {Placement{Shard{0}}, Placement{Shard{1}}}) {
      const auto [y, own_kept, own_gradient] = run(line, {placement});
      EXPECT_TRUE(at::equal(y, whole));
      EXPECT_TRUE(at::equal(own_kept, kept));
      EXPECT_TRUE(at::equal(own_gradient, gradient));
    }
  });
}

TEST(NativeDropout, KeepsOrDropsAllAtTheEnds) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::ones(kSizes), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto whole = [](const at::Tensor& t) { return DistributedTensor(t).full_tensor(); };
    EXPECT_TRUE(at::equal(whole(std::get<0>(at::native_dropout(x, 0.5, false))), at::ones(kSizes)));
    EXPECT_TRUE(whole(std::get<1>(at::native_dropout(x, 0.0, true))).all().item<bool>());
    EXPECT_TRUE(at::equal(whole(std::get<0>(at::native_dropout(x, 1.0, true))), at::zeros(kSizes)));
  });
}

TEST(RandomOperators, DifferFromCallToCallAndRepeatFromAState) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros(kSizes), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto state = random_state();
    const auto first = DistributedTensor(at::rand_like(x)).full_tensor();
    EXPECT_FALSE(at::equal(DistributedTensor(at::rand_like(x)).full_tensor(), first));
    set_random_state(state);
    EXPECT_TRUE(at::equal(DistributedTensor(at::rand_like(x)).full_tensor(), first));
  });
}

TEST(RandomOperators, LeaveLibtorchsGeneratorAlone) {
  RunRanks(1, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros(kSizes), rank.mesh({1}, {"x"}), {Shard{0}});
    at::manual_seed(3);
    const auto expected = at::rand({4});
    at::manual_seed(3);
    x.exponential_();
    x.uniform_();
    EXPECT_TRUE(at::equal(at::rand({4}), expected));
  });
}

}  // namespace
}  // namespace tessera

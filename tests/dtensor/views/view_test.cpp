// Views of distributed tensors: what is written through them arrives, under autograd too, or
// raises.

#include <ostream>

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

struct Case {
  const char* name;
  std::function<void(at::Tensor&)> write;
  /// Whether a Shard of dimension 0 (then 1) can be written through without moving data: then a
  /// strict scope allows it.
  bool rows = true;
  bool columns = true;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

/// y = 2 x, written through a view, then the sum of cubes: value and gradient.
std::pair<at::Tensor, at::Tensor> run(const Case& c, const at::Tensor& x) {
  auto y = x.mul(2);
  c.write(y);
  y.pow(3).sum().backward();
  return {y.detach(), x.grad()};
}

class WriteThroughView : public ::testing::TestWithParam<Case> {};

TEST_P(WriteThroughView, Arrives) {
  const auto& c = GetParam();
  const auto expected = run(c, values({7, 6}).requires_grad_());
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const auto& [placement, writable] : std::vector<std::pair<Placement, bool>>{
             {Replicate{}, true}, {Shard{0}, c.rows}, {Shard{1}, c.columns}}) {
      const auto x = distribute_tensor(values({7, 6}), mesh, {placement}).tensor().detach();
      {
        at::NoGradGuard no_grad;
        StrictScope strict;
        auto y = x.clone();
        if (writable) {
          EXPECT_NO_THROW(c.write(y)) << to_string(placement);
        } else {
          EXPECT_ERROR(c.write(y), "the strict scope refuses") << to_string(placement);
        }
      }
      const auto found = run(c, x.requires_grad_());
      EXPECT_TRUE(at::allclose(DistributedTensor(found.first).full_tensor(), expected.first))
          << to_string(placement);
      EXPECT_TRUE(at::allclose(DistributedTensor(found.second).full_tensor(), expected.second))
          << to_string(placement);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, WriteThroughView,
    ::testing::Values(
        Case{"transpose", [](at::Tensor& y) { y.t().mul_(3); }},
        Case{"flatten", [](at::Tensor& y) { y.view({42}).mul_(3); }},
        Case{"unsqueeze", [](at::Tensor& y) { y.unsqueeze(1).add_(1); }},
        Case{"first_rows", [](at::Tensor& y) { y.slice(0, 0, 2).zero_(); }, false, true},
        Case{"first_columns", [](at::Tensor& y) { y.slice(1, 0, 2).zero_(); }, true, false},
        Case{"row", [](at::Tensor& y) { y.select(0, 1).fill_(1.0); }, false, true},
        Case{"diagonal", [](at::Tensor& y) { y.diagonal().zero_(); }, false, false},
        Case{"of_a_view", [](at::Tensor& y) { y.t().unsqueeze(0).mul_(3); }},
        Case{"narrow_copy",
             [](at::Tensor& y) { y.narrow(1, 2, 3).copy_(y.narrow(1, 0, 3).clone()); }, true,
             false}),
    [](const auto& info) { return info.param.name; });

TEST(View, SharesMemoryAndVersionWithItsBase) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros({4, 2}), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto view = x.t();
    const auto version = x._version();
    view.add_(1);
    EXPECT_EQ(x._version(), version + 1);
    EXPECT_EQ(local_tensor(x)._version(), version + 1);
    EXPECT_TRUE(at::equal(local_tensor(x), at::ones({2, 2})));
  });
}

TEST(View, AGatheredViewCanBeReadUntilItsBaseIsWritten) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros({4}), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto head = x.slice(0, 0, 3);
    EXPECT_EQ(head.sum().item<float>(), 0);
    x.add_(1);
    EXPECT_ERROR(head.sum(), "after the viewed tensor was written");
  });
}

TEST(View, AGatheredViewCanBeReadAfterItWasWritten) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::zeros({4}), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto head = x.slice(0, 0, 3);
    head.add_(2);
    head.mul_(3);
    EXPECT_EQ(head.sum().item<float>(), 18);
    EXPECT_EQ(x.sum().item<float>(), 18);
  });
}

TEST(View, HasTheSameStridesOnEveryRank) {
  RunRanks(4, [](Rank& rank) {
    // One row a rank, none on the last: local strides alone would say nothing.
    const at::Tensor x = distribute_tensor(values({3, 1}), rank.mesh({4}, {"x"}), {Shard{0}});
    EXPECT_EQ(x.t().strides(), values({3, 1}).t().strides());
    EXPECT_EQ(x.expand({3, 5}).strides(), values({3, 1}).expand({3, 5}).strides());
  });
}

TEST(View, WhatLibtorchRefusesIsRefusedOnEveryRank) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(values({2, 3}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_THROWN(c10::Error, x.t().view({6}), "view size is not compatible");
    EXPECT_THROWN(c10::Error, x.view({4}), "shape '[4]' is invalid for input of size 6");
  });
}

TEST(View, WritesToAViewFromAListArrive) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    at::NoGradGuard no_grad;
    const at::Tensor x = distribute_tensor(values({4, 6}), mesh, {Shard{0}});
    x.chunk(2, 1)[1].zero_();
    auto expected = values({4, 6});
    expected.chunk(2, 1)[1].zero_();
    EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), expected));
    x.chunk(2, 0)[1].t().add_(5);
    expected.chunk(2, 0)[1].t().add_(5);
    EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), expected));
  });
}

TEST(InPlace, ShapeChangesApplyToTheWrapper) {
  RunRanks(2, [](Rank& rank) {
    at::Tensor x = distribute_tensor(values({3, 4}), rank.mesh({2}, {"x"}), {Shard{0}});
    x.t_();
    EXPECT_EQ(x.sizes(), (std::vector<std::int64_t>{4, 3}));
    EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), values({3, 4}).t()));
    x.unsqueeze_(0);
    EXPECT_EQ(x.sizes(), (std::vector<std::int64_t>{1, 4, 3}));
    EXPECT_TRUE(at::equal(DistributedTensor(x.mul(2)).full_tensor(),
                          values({3, 4}).t().unsqueeze(0).mul(2)));
  });
}

TEST(InPlace, OnAPartialTensorEqualsOneRank) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(values({5}), rank.mesh({2}, {"x"}), {Partial{}});
    x.relu_();
    x.add_(1);
    x.fill_(3);
    EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), at::full({5}, 3, at::kDouble)));
    EXPECT_EQ(DistributedTensor(x).placements(), Placements{Partial{}});
  });
}

TEST(OutArgument, IsFilledWithItsOwnLayout) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor a = distribute_tensor(values({5, 4}), mesh, {Shard{0}});
    at::Tensor out = distribute_tensor(at::zeros({5, 4}, at::kDouble), mesh, {Shard{1}});
    at::add_out(out, a, a);
    EXPECT_EQ(DistributedTensor(out).placements(), Placements{Shard{1}});
    EXPECT_TRUE(at::equal(DistributedTensor(out).full_tensor(), values({5, 4}) * 2));
  });
}

}  // namespace
}  // namespace tessera

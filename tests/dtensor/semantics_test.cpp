// Distributed tensors where libtorch looks twice: inference mode, second derivatives, lazy bits,
// autograd across the border to plain tensors.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/meta_factory.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera {
namespace {

using testing::values;

at::Tensor split(const at::Tensor& value, Rank& rank, const Placement& placement = Shard{0}) {
  const auto mesh = rank.mesh({rank.size()}, {"x"});
  return distribute_tensor(value, mesh, {placement}).tensor().detach();
}

at::Tensor whole(const at::Tensor& tensor) {
  return DistributedTensor(tensor).full_tensor();
}

TEST(InferenceMode, RunsCompositeAndViewAndInPlaceOperators) {
  RunRanks(2, [](Rank& rank) {
    const auto outside = split(values({5, 4}), rank);
    const c10::InferenceMode inference;
    const auto x = split(values({5, 4}), rank);
    const auto w = split(values({3, 4}, 1), rank, Replicate{});
    EXPECT_TRUE(
        at::allclose(whole(at::linear(x, w)), at::linear(values({5, 4}), values({3, 4}, 1))));
    EXPECT_TRUE(at::equal(whole(x.t().matmul(outside).add_(1)),
                          values({5, 4}).t().matmul(values({5, 4})).add(1)));
    x.view({20}).mul_(2);
    EXPECT_TRUE(at::equal(whole(x), values({5, 4}).mul(2)));
  });
}

TEST(Autograd, DifferentiatesTwice) {
  auto plain = values({5, 4}).requires_grad_();
  const auto once = torch::autograd::grad({plain.pow(3).sum()}, {plain}, {}, {}, true)[0];
  const auto expected = torch::autograd::grad({once.mul(plain).sum()}, {plain})[0];
  RunRanks(2, [&](Rank& rank) {
    const auto x = split(values({5, 4}), rank).requires_grad_();
    const auto y = DistributedTensor(x).redistribute({Shard{1}}).tensor();
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, {}, true)[0];
    const auto second = torch::autograd::grad({first.mul(x).sum()}, {x})[0];
    EXPECT_TRUE(at::allclose(whole(second), expected));
  });
}

TEST(Autograd, CrossesFromLocalAndToLocal) {
  RunRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    auto local = values({3, 4}, rank.rank()).requires_grad_();
    const auto x = DistributedTensor::from_local(local, mesh, {Shard{0}});
    const auto out = DistributedTensor(x.tensor().pow(2)).to_local();
    out.sum().backward();
    EXPECT_TRUE(at::allclose(local.grad(), local.detach() * 2));
  });
}

TEST(Autograd, TakesLocalGradientsForWhatTheyAreSaidToBe) {
  RunRanks(2, [](Rank& rank) {
    const auto x = split(values({4}), rank, Replicate{}).requires_grad_();
    // Every rank adds its own part of the gradient.
    DistributedTensor(x).to_local(Placements{Partial{}}).mul(rank.rank() + 1).sum().backward();
    EXPECT_TRUE(at::equal(whole(x.grad()), at::full({4}, 3, at::kDouble)));
  });
}

TEST(Autograd, AccumulatesIntoAGradientWithTheLeafsPlacements) {
  RunRanks(2, [](Rank& rank) {
    const auto weight = split(values({4, 3}, 1), rank, Replicate{}).requires_grad_();
    for (int i = 0; i < 2; ++i) split(values({6, 4}), rank).matmul(weight).sum().backward();
    auto plain = values({4, 3}, 1).requires_grad_();
    values({6, 4}).matmul(plain).sum().mul(2).backward();
    EXPECT_EQ(DistributedTensor(weight.grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(whole(weight.grad()), plain.grad()));
  });
}

TEST(LazyBits, ShowOnTheOutside) {
  RunRanks(2, [](Rank& rank) {
    const auto z = at::complex(values({5, 2}), values({5, 2}, 3));
    const auto conjugate = split(z, rank).conj();
    EXPECT_TRUE(conjugate.is_conj());
    EXPECT_TRUE(at::equal(whole(conjugate), z.conj().resolve_conj()));
    EXPECT_TRUE(at::equal(whole(conjugate.mul(2)), z.conj().mul(2)));
    EXPECT_TRUE(at::equal(whole(at::imag(conjugate)), at::imag(z.conj()).resolve_neg()));
  });
}

TEST(Detach, SharesValuesAndVersion) {
  RunRanks(2, [](Rank& rank) {
    const auto x = split(values({4}), rank).requires_grad_();
    const auto alias = x.detach();
    EXPECT_FALSE(alias.requires_grad());
    alias.zero_();
    EXPECT_TRUE(at::equal(whole(x).detach(), at::zeros({4}, at::kDouble)));
    EXPECT_EQ(x._version(), alias._version());
  });
}

TEST(MetaFactory, SendsFactoriesToTheMetaDeviceUnlessTheyNameOne) {
  const detail::MetaFactoryGuard scope;
  EXPECT_TRUE(at::empty({2, 3}).is_meta());
  EXPECT_TRUE(at::zeros({2}).is_meta());
  EXPECT_TRUE(at::arange(5).is_meta());
  EXPECT_FALSE(at::ones({2}, at::device(at::kCPU)).is_meta());
  EXPECT_TRUE(at::ones({2}, at::device(at::kCPU)).add(1).device().is_cpu());
}

TEST(Meta, DistributedTensorsRunOperatorsWithoutData) {
  const auto mesh = init_device_mesh(comm::fake_world(2, 4), {4}, {"x"});
  const at::Tensor x =
      distribute_tensor(at::empty({7, 4}, at::device(at::kMeta)), mesh, {Shard{0}});
  const auto y = at::softmax(x.matmul(x.t()), 0);
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(y.sizes(), (std::vector<std::int64_t>{7, 7}));
}

}  // namespace
}  // namespace tessera

// Distributed tensors where libtorch looks twice: inference mode, second derivatives, lazy bits,
// autograd across the border to plain tensors.

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/detail/meta_factory.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;

at::Tensor split(const at::Tensor& value, Rank& rank, const Placement& placement = Shard{0}) {
  const auto mesh = rank.mesh({rank.size()}, {"x"});
  return distribute_tensor(value, mesh, {placement}).tensor().detach();
}

TEST(InferenceMode, RunsCompositeAndViewAndInPlaceOperators) {
  RunRanks(2, [](Rank& rank) {
    const auto outside = split(values({5, 4}), rank);
    const c10::InferenceMode inference;
    const auto x = split(values({5, 4}), rank);
    const auto w = split(values({3, 4}, 1), rank, Replicate{});
    EXPECT_TRUE(
        at::allclose(full_tensor(at::linear(x, w)), at::linear(values({5, 4}), values({3, 4}, 1))));
    EXPECT_TRUE(at::allclose(full_tensor(x.t().matmul(outside).add_(1)),
                             values({5, 4}).t().matmul(values({5, 4})).add(1)));
    x.view({20}).mul_(2);
    EXPECT_TRUE(at::equal(full_tensor(x), values({5, 4}).mul(2)));
  });
}

/// Views of a tensor of 7 by 4, of its split dimension 0 for the most part.
const std::vector<std::function<at::Tensor(const at::Tensor&)>>& views() {
  static const std::vector<std::function<at::Tensor(const at::Tensor&)>> all{
      [](const at::Tensor& x) { return x.slice(0, 2, 6); },
      [](const at::Tensor& x) { return x.slice(1, 1, 3); },
      [](const at::Tensor& x) { return x.select(0, 5); },
      [](const at::Tensor& x) { return x.split(3)[1]; },
      [](const at::Tensor& x) { return x.chunk(3)[2]; },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5); },
      [](const at::Tensor& x) { return x.view({28}); },
      [](const at::Tensor& x) { return x.transpose(0, 1); },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5).select(0, 2); },
      [](const at::Tensor& x) { return x.detach(); },
      [](const at::Tensor& x) { return x.narrow(0, 1, 5).detach(); },
  };
  return all;
}

// libtorch makes views of them ordinary tensors, too.
TEST(InferenceMode, ViewsAndWritesOrdinaryTensors) {
  for (const int ranks : {2, 4}) {
    RunRanks(ranks, [](Rank& rank) {
      for (const auto& view : views()) {
        for (const Placement placement : {Placement(Shard{0}), Placement(Shard{1})}) {
          const auto plain = values({7, 4});
          const auto x = split(values({7, 4}), rank, placement);
          at::Tensor h;
          {
            const c10::InferenceMode inference;
            h = view(x);
            EXPECT_FALSE(h.is_inference());
            EXPECT_TRUE(at::equal(full_tensor(h), view(plain)));
            EXPECT_TRUE(full_tensor(h.add(1)).is_inference());
            h.mul_(2);
            view(plain).mul_(2);
            EXPECT_TRUE(at::equal(full_tensor(x), plain));
            EXPECT_TRUE(at::equal(full_tensor(h), view(plain)));
          }
          h.add_(1);
          view(plain).add_(1);
          EXPECT_TRUE(at::equal(full_tensor(x), plain));
          EXPECT_EQ(x._version(), 2);
        }
      }
    });
  }
}

TEST(InferenceMode, DoesNotReadAGatheredViewOnceTheViewedTensorWasWritten) {
  RunRanks(2, [](Rank& rank) {
    const auto x = split(values({7, 4}), rank);
    const c10::InferenceMode inference;
    const auto h = x.slice(0, 2, 6);
    x.add_(1);
    EXPECT_ERROR(full_tensor(h), "after the viewed tensor was written");
    EXPECT_ERROR(h.add(1), "after the viewed tensor was written");
    EXPECT_ERROR(h.zero_(), "after the viewed tensor was written");
    EXPECT_TRUE(at::equal(full_tensor(x), values({7, 4}).add(1)));
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
    EXPECT_TRUE(at::allclose(full_tensor(second), expected));
  });
}

TEST(Autograd, CrossesFromLocalAndToLocal) {
  RunOnMesh({2}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
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
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::full({4}, 3, at::kDouble)));
  });
}

TEST(Autograd, AccumulatesIntoAGradientWithTheLeafsPlacements) {
  RunRanks(2, [](Rank& rank) {
    const auto weight = split(values({4, 3}, 1), rank, Replicate{}).requires_grad_();
    for (int i = 0; i < 2; ++i) {
      split(values({6, 4}), rank).matmul(weight).sum().backward();
    }
    auto plain = values({4, 3}, 1).requires_grad_();
    values({6, 4}).matmul(plain).sum().mul(2).backward();
    EXPECT_EQ(DistributedTensor(weight.grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(full_tensor(weight.grad()), plain.grad()));
  });
}

TEST(LazyBits, AreVisibleOnTheDistributedTensor) {
  RunRanks(2, [](Rank& rank) {
    const auto z = at::complex(values({5, 2}), values({5, 2}, 3));
    const auto conjugate = split(z, rank).conj();
    EXPECT_TRUE(conjugate.is_conj());
    EXPECT_TRUE(at::equal(full_tensor(conjugate), z.conj().resolve_conj()));
    EXPECT_TRUE(at::equal(full_tensor(conjugate.mul(2)), z.conj().mul(2)));
    EXPECT_TRUE(at::equal(full_tensor(at::imag(conjugate)), at::imag(z.conj()).resolve_neg()));
  });
}

TEST(Detach, SharesValuesAndVersion) {
  RunRanks(2, [](Rank& rank) {
    const auto x = split(values({4}), rank).requires_grad_();
    const auto alias = x.detach();
    EXPECT_FALSE(alias.requires_grad());
    alias.zero_();
    EXPECT_TRUE(at::equal(full_tensor(x).detach(), at::zeros({4}, at::kDouble)));
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

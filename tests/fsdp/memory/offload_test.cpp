// Shards, gradients and the optimizer in the host's memory.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>

#include "fsdp/param_group.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/comm/streams.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

using testing::Sizes;

const Options kOffload{.offload_policy = OffloadPolicy{}};

std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& model) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [name, slot] : model.named_slots()) {
    slots.push_back(slot);
  }
  return slots;
}

class Offload : public ::testing::TestWithParam<int> {};

TEST_P(Offload, TrainsAsOneRankDoes) {
  const Sizes sizes;
  const testing::Training expected = testing::train_alone(sizes, 3);
  RunRanks(GetParam(), [&](Rank& rank) {
    ShardedModel model(rank.mesh({rank.size()}, {"dp"}), kOffload, sizes);
    testing::expect_training(model, rank, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Offload, ::testing::Values(1, 2, 4));

TEST(Offload, KeepsShardsAndGradientsOnTheHost) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), kOffload, {4, 6, 3});
    testing::local_loss(model, rank).backward();
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(local_tensor(slot->persistent()).device().is_cpu()) << name;
      EXPECT_TRUE(local_tensor(slot->persistent().grad()).device().is_cpu()) << name;
    }
  });
}

TEST(Offload, StepsAnOptimizerThatWasMadeBefore) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3), other(4, 6, 3);
    testing::fill(model);
    testing::fill(other);
    optim::AdamW optimizer(model, {.lr = 0.1}), other_optimizer(other, {.lr = 0.1});
    shard(model, rank.mesh({2}, {"dp"}), kOffload);
    shard(other, rank.mesh({2}, {"dp"}));
    for (int step = 0; step < 2; ++step) {
      testing::local_loss(model, rank, step).backward();
      testing::local_loss(other, rank, step).backward();
      optimizer.step();
      other_optimizer.step();
      optimizer.zero_grad();
      other_optimizer.zero_grad();
    }
    const auto expected = other.named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(
          local_tensor(slot->persistent()).equal(local_tensor(expected[i++].second->persistent())))
          << name;
    }
  });
}

TEST(Offload, AccumulatesAcrossBackwards) {
  const std::vector<at::Tensor> expected = testing::gradients_alone({}, {0, 1, 2});
  RunRanks(3, [&](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}), kOffload);
    testing::local_loss(model, rank, 0).backward();
    set_requires_gradient_sync(model, false);
    testing::local_loss(model, rank, 1).backward();
    set_requires_gradient_sync(model, true);
    testing::local_loss(model, rank, 2).backward();
    testing::expect_gradients(model, expected);
  });
}

/// Lanes that tell when the host waits for one.
class HostWaits final : public comm::Streams {
 public:
  explicit HostWaits(std::function<void()> waits) : waits_(std::move(waits)) {}
  comm::StreamEventPtr record(comm::Lane) override { return std::make_shared<comm::StreamEvent>(); }
  void wait(comm::Lane, const comm::StreamEventPtr&) override {}
  void synchronize(const comm::StreamEventPtr&) override { waits_(); }

 private:
  void enter(comm::Lane) override {}
  void leave() override {}

  std::function<void()> waits_;
};

struct CountCalls final : torch::autograd::PostAccumulateGradHook {
  explicit CountCalls(int& count) : calls(count) {}
  void operator()(const at::Tensor&) override { ++calls; }
  int& calls;
};

/// Copies to the host run beside it: a gradient is not there before the host has waited.
TEST(Offload, AddsGradientsAndCallsHooksOnceTheHostHasWaited) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), kOffload, {4, 6, 3});
    const at::Tensor weight = model.head->slot("weight")->persistent();
    int calls = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountCalls>(calls));
    std::vector<at::Tensor> found;
    std::vector<int> called;
    model.attached<Unit>()->parameters().set_comm_context(
        std::make_shared<CommContext>(std::make_shared<HostWaits>([&] {
                                        found.push_back(local_tensor(weight.grad()).clone());
                                        called.push_back(calls);
                                      }),
                                      at::kCPU));
    testing::local_loss(model, rank, 0).backward();
    const at::Tensor first = local_tensor(weight.grad()).clone();
    testing::local_loss(model, rank, 1).backward();
    ASSERT_EQ(found.size(), 2u);
    EXPECT_TRUE(at::equal(found[1], first));
    EXPECT_FALSE(at::equal(local_tensor(weight.grad()), first));
    EXPECT_EQ(called, (std::vector<int>{0, 1}));
    EXPECT_EQ(calls, 2);
  });
}

TEST(Offload, AddsNothingOfABackwardThatFailed) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), kOffload, {4, 6, 3});
    const auto step = [&] {
      testing::local_loss(model, rank, 0).backward();
      return testing::take_gradients(model);
    };
    const std::vector<at::Tensor> expected = step();
    // After a first micro-batch, the second fails where nearly all of its reductions have begun.
    testing::local_loss(model, rank, 0).backward();
    const at::Tensor x = testing::batch(4, 1).requires_grad_();
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw Error("planted"); });
    const std::int64_t rows = testing::kRows / rank.size();
    const at::Tensor loss = testing::loss_of(model, x, rank.rank() * rows, rows);
    EXPECT_ERROR(loss.backward(), "planted");
    for (const nn::SlotPtr& slot : slots_of(model)) {
      slot->persistent().mutable_grad().reset();
    }
    const std::vector<at::Tensor> found = step();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
    }
  });
}

// PyTorch needs a second back end for it.
TEST(Offload, ClipsByTheNormOfAllShards) {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    Filled<SmallModel> alone(4, 7, 3);
    testing::loss_of(alone, testing::batch(4, 0), 0, testing::kRows).backward();
    const optim::NormOptions norm_type{.norm_type = p};
    const double expected = optim::clip_grad_norm_(slots_of(alone), 0.1, norm_type).item<double>();
    const std::vector<at::Tensor> clipped = testing::gradients_of(alone);
    RunRanks(3, [&](Rank& rank) {
      ShardedModel model(rank.mesh({3}, {"dp"}), kOffload, {4, 7, 3});
      testing::local_loss(model, rank).backward();
      const comm::TrafficTable before = rank.world()->traffic().table();
      const double norm = optim::clip_grad_norm_(slots_of(model), 0.1, norm_type).item<double>();
      EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
      EXPECT_NEAR(norm, expected, 1e-5 * expected) << "p = " << p;
      testing::expect_gradients(model, clipped);
    });
  }
}

TEST(Offload, ComputesInAnotherTypeFromShardsInFp32) {
  RunRanks(2, [](Rank& rank) {
    Options options = kOffload;
    options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    ShardedModel model(rank.mesh({2}, {"dp"}), options, {4, 6, 3});
    testing::local_loss(model, rank).backward();
    EXPECT_EQ(model.head->slot("weight")->persistent().grad().scalar_type(), at::kFloat);
  });
}

TEST(Offload, TakesAModelFromTheMetaDevice) {
  RunRanks(2, [](Rank& rank) {
    Filled<SmallModel> reference(5, 7, 2);
    const auto model = testing::made_on_meta<SmallModel>(5, 7, 2);
    shard(*model, rank.mesh({2}, {"dp"}), kOffload);
    nn::to_empty(*model, at::kCPU);
    testing::fill(*model);
    const at::Tensor x = testing::batch(5, 0);
    EXPECT_TRUE((*model)(x).allclose(reference(x)));
  });
}

}  // namespace
}  // namespace tessera::fsdp

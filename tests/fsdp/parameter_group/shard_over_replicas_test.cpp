// HSDP whose shards lie over all ranks, not over each replica's alone.
#include <gmock/gmock.h>

#include <tuple>

#include "fsdp/parameter_group/over_replicas.h"
#include "fsdp/training/training.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "testing/files.h"
#include "testing/memory/memory_scope.h"

namespace tessera::fsdp {
namespace {

using testing::Gathers;
using testing::gathers;
using testing::halve;
using ::testing::HasSubstr;
using testing::hybrid_mesh;
using testing::kOverReplicas;
using testing::kRows;

/// What tells the last micro-batch of a step from those before it.
struct MicroBatching {
  const char* name;
  int micro_batches;
  std::function<void(SmallModel&, bool last)> set_last;
  bool reduces_each = true;
};

const MicroBatching kNone{"None", 1, [](SmallModel&, bool) {}};
const MicroBatching kReduceEach{"ReduceEach", 3, set_is_last_backward};
const MicroBatching kReduceLast{
    "ReduceLast", 3, [](SmallModel& model, bool last) { set_requires_gradient_sync(model, last); },
    false};
const MicroBatching kAllReduceLast{
    "AllReduceLast", 3, [](SmallModel& model, bool last) { set_requires_all_reduce(model, last); }};

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> gradients;  ///< of the first step
  std::vector<at::Tensor> parameters;
};

/// Three steps of AdamW on part `part` of `parts` of each micro-batch.
Outcome train(SmallModel& model, const MicroBatching& how, std::int64_t part, std::int64_t parts) {
  Outcome outcome;
  optim::AdamW optimizer(model, {.lr = 0.01});
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < how.micro_batches; ++i) {
      if (parts > 1) {
        how.set_last(model, i + 1 == how.micro_batches);
      }
      const at::Tensor batch = testing::batch(testing::kDim, 10 * step + i);
      const at::Tensor loss = testing::loss_of(model, batch, part * kRows / parts, kRows / parts);
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
    for (const nn::SlotPtr& slot : optimizer.parameters()) {
      if (step == 0) {
        outcome.gradients.push_back(full_tensor(slot->persistent().grad()).clone());
      }
    }
    outcome.norms.push_back(optim::clip_grad_norm_(optimizer.parameters(), 0.5).item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const nn::SlotPtr& slot : optimizer.parameters()) {
    outcome.parameters.push_back(full_tensor(slot->persistent()));
  }
  return outcome;
}

void expect_same(const Outcome& outcome, const Outcome& expected, const Rank& rank) {
  at::Tensor losses = at::tensor(outcome.losses, at::kDouble);
  rank.mesh({rank.size()}, {"all"}).group().all_reduce(losses, ReduceOp::kSum)->wait();
  losses = losses / rank.size();
  EXPECT_TRUE(losses.allclose(at::tensor(expected.losses, at::kDouble), 1e-4, 1e-5));
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    EXPECT_NEAR(outcome.norms[i], expected.norms[i], 1e-5);
  }
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_TRUE(outcome.gradients[i].allclose(expected.gradients[i], 1e-4, 1e-6)) << i;
    EXPECT_TRUE(outcome.parameters[i].allclose(expected.parameters[i], 1e-4, 1e-5)) << i;
  }
}

using Sides = std::pair<std::int64_t, std::int64_t>;
using Case = std::tuple<Sides, MicroBatching>;

class ShardOverReplicas : public ::testing::TestWithParam<Case> {};

TEST_P(ShardOverReplicas, TrainsAsOneRankDoes) {
  const auto [replicas, shards] = std::get<Sides>(GetParam());
  const MicroBatching& how = std::get<MicroBatching>(GetParam());
  Filled<SmallModel> alone(testing::kDim, testing::kHidden, testing::kClasses);
  const Outcome expected = train(alone, how, 0, 1);
  RunRanks(static_cast<int>(replicas * shards), [&, r = replicas, s = shards](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, r, s), kOverReplicas);
    const comm::TrafficTable before = rank.world()->traffic().table();
    expect_same(train(model, how, rank.rank(), rank.size()), expected, rank);
    // Three steps of four units. The root stays whole between forward and backward; and
    // reading gradients and parameters.
    const int of_all = 12 + 2 * 14, within = 3 * (7 * how.micro_batches - 4);
    if (r > 1) {
      EXPECT_EQ(gathers(rank, before), (Gathers{of_all, s > 1 ? within : 0}));
    }
    EXPECT_EQ(traffic_of(rank.world()->traffic().since(before), "replicate_shard", "reduce_scatter")
                  .calls,
              12 * (how.reduces_each ? how.micro_batches : 1));
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardOverReplicas,
                         ::testing::Combine(::testing::Values(Sides{2, 2}, Sides{2, 3}, Sides{3, 2},
                                                              Sides{3, 1}, Sides{1, 3}),
                                            ::testing::Values(kNone, kReduceEach, kReduceLast,
                                                              kAllReduceLast)),
                         [](const auto& info) {
                           const Sides sides = std::get<Sides>(info.param);
                           return std::to_string(sides.first) + "x" + std::to_string(sides.second) +
                                  std::get<MicroBatching>(info.param).name;
                         });

TEST(ShardsOverReplicas, AreHeldOnceByAllRanks) {
  RunRanks(6, [](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 3), kOverReplicas);
    optim::AdamW optimizer(model, {});
    local_loss(model, rank).backward();
    std::int64_t shards = 0, gradients = 0, states = 0, all = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      const at::Tensor& parameter = slot->persistent();
      EXPECT_EQ(DistributedTensor(parameter).placements(), (Placements{Shard{0}})) << name;
      EXPECT_EQ(sharding_spec(parameter).mesh.size(), 6);
      all += parameter.numel();
      shards += local_tensor(parameter).numel();
      gradients += local_tensor(parameter.grad()).numel();
    }
    for (const optim::StateTensor& state : optimizer.state()) {
      states += local_tensor(state.tensor).numel();
    }
    const at::Tensor sums = at::tensor({shards, gradients, states}, at::kLong);
    rank.mesh({6}, {"all"}).group().all_reduce(sums, ReduceOp::kSum)->wait();
    const std::int64_t counters = 6 * 14;  // of steps: one a rank and parameter
    EXPECT_TRUE(sums.equal(at::tensor({all, all, 2 * all + counters}, at::kLong))) << sums;
  });
}

// Every size divides: a sixth of the masters and of their gradients, and between micro-batches a
// half of the bf16 values.
TEST(ShardsOverReplicas, HoldNoMoreThanTheirShareAndAPiece) {
  constexpr std::int64_t kDim = 96, kHidden = 192, kClasses = 96;
  RunRanks(6, [](Rank& rank) {
    testing::MemoryScope memory;
    Options options = kOverReplicas;
    options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    ShardedModel model(hybrid_mesh(rank, 3, 2), options, {kDim, kHidden, kClasses});
    std::int64_t numel = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      numel += slot->persistent().numel();
    }
    constexpr std::int64_t kSlack = 8192;
    EXPECT_NEAR(memory.bytes(), 4 * numel / 6, kSlack);
    set_is_last_backward(model, false);
    local_loss(model, rank).backward();
    set_is_last_backward(model, true);
    local_loss(model, rank).backward();
    EXPECT_NEAR(memory.bytes(), 2 * 4 * numel / 6, kSlack);
    set_is_last_backward(model, false);
    {
      const c10::AutoGradMode no_grad(false);
      local_loss(model, rank);
    }
    EXPECT_NEAR(memory.bytes(), 2 * 4 * numel / 6 + 2 * numel / 2, kSlack);
  });
}

void expect_values(const nn::ModuleBase& model, double factor) {
  Filled<SmallModel> alone(testing::kDim, testing::kHidden, testing::kClasses);
  const auto expected = alone.named_slots();
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_TRUE(
        full_tensor(slot->persistent()).equal(expected[i++].second->get().detach() * factor))
        << name;
  }
}

TEST(ShardsOverReplicas, AreSavedAndLoadedAsOthers) {
  const testing::TemporaryFolder folder;
  RunRanks(6, [&](Rank& rank) {
    ShardedModel over(hybrid_mesh(rank, 2, 3), kOverReplicas), hybrid(hybrid_mesh(rank, 2, 3));
    halve(over);
    checkpoint::save_hugging_face(over, *rank.world(), folder / "over", "{}");
    checkpoint::load_hugging_face(hybrid, folder / "over");
    expect_values(hybrid, 0.5);
    halve(hybrid);
    checkpoint::save_hugging_face(hybrid, *rank.world(), folder / "hybrid", "{}");
    checkpoint::load_hugging_face(over, folder / "hybrid");
    expect_values(over, 0.25);
  });
}

TEST(ShardsOverReplicas, NeedReplicas) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(3, 4);
    EXPECT_ERROR(fully_shard(linear, rank.mesh({4}, {"dp"}), kOverReplicas),
                 "shard_over_replicas was asked for on DeviceMesh((dp=4), cpu)");
    Options both = kOverReplicas;
    both.post_forward_mesh_size = 2;
    EXPECT_ERROR(fully_shard(linear, hybrid_mesh(rank, 2, 2), both),
                 "post_forward_mesh_size = 2 and shard_over_replicas");
    EXPECT_ERROR(replicate(linear, rank.mesh({4}, {"dp"}), kOverReplicas), "shard_over_replicas");
    EXPECT_FALSE(tessera::is_distributed(linear.weight));
  });
}

}  // namespace
}  // namespace tessera::fsdp

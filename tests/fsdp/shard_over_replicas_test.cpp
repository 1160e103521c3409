// HSDP whose shards lie over all ranks, not over each replica's alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "fsdp/training.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/fsdp/collectives.h"
#include "tessera/fsdp/parameter_copy.h"
#include "tessera/fsdp/policy.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/memory_scope.h"

namespace tessera::fsdp {
namespace {

using testing::ErrorOf;
using testing::expect_gradients;
using testing::gradients_alone;
using ::testing::HasSubstr;
using testing::kRows;
using testing::local_loss;
using testing::ShardedModel;
using testing::SmallModel;
using testing::traffic_of;
using testing::whole;

const Options kOverReplicas{.shard_over_replicas = true};

DeviceMesh hybrid_mesh(const Rank& rank, std::int64_t replicas, std::int64_t shards) {
  return rank.mesh({replicas, shards}, {"replicate", "shard"});
}

/// Calls of all-gathers over all ranks, and within the replica, since `before`.
std::pair<std::int64_t, std::int64_t> gathers(const Rank& rank, const comm::TrafficTable& before) {
  const comm::TrafficTable traffic = rank.world()->traffic().since(before);
  return {traffic_of(traffic, "replicate_shard", "all_gather").calls,
          traffic_of(traffic, "shard", "all_gather").calls};
}
using Path = std::filesystem::path;
using Gathers = std::pair<std::int64_t, std::int64_t>;

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
      if (parts > 1) how.set_last(model, i + 1 == how.micro_batches);
      const at::Tensor batch = testing::batch(testing::kDim, 10 * step + i);
      const at::Tensor loss = testing::loss_of(model, batch, part * kRows / parts, kRows / parts);
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
    for (const nn::SlotPtr& slot : optimizer.parameters())
      if (step == 0) outcome.gradients.push_back(whole(slot->persistent().grad()).clone());
    outcome.norms.push_back(optim::clip_grad_norm_(optimizer.parameters(), 0.5).item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const nn::SlotPtr& slot : optimizer.parameters())
    outcome.parameters.push_back(whole(slot->persistent()));
  return outcome;
}

void expect_same(const Outcome& outcome, const Outcome& expected, const Rank& rank) {
  at::Tensor losses = at::tensor(outcome.losses, at::kDouble);
  rank.mesh({rank.size()}, {"all"}).group().all_reduce(losses, ReduceOp::kSum)->wait();
  losses = losses / rank.size();
  EXPECT_TRUE(losses.allclose(at::tensor(expected.losses, at::kDouble), 1e-4, 1e-5));
  for (std::size_t i = 0; i < expected.norms.size(); ++i)
    EXPECT_NEAR(outcome.norms[i], expected.norms[i], 1e-5);
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
  SmallModel alone(testing::kDim, testing::kHidden, testing::kClasses);
  testing::fill(alone);
  const Outcome expected = train(alone, how, 0, 1);
  RunRanks(static_cast<int>(replicas * shards), [&, r = replicas, s = shards](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, r, s), kOverReplicas);
    const comm::TrafficTable before = rank.world()->traffic().table();
    expect_same(train(model, how, rank.rank(), rank.size()), expected, rank);
    // Three steps of four units, of which the root stays whole between forward and backward; and
    // whole() of gradients and parameters.
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
    for (const optim::StateTensor& state : optimizer.state())
      states += local_tensor(state.tensor).numel();
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
    for (const auto& [name, slot] : model.named_slots()) numel += slot->persistent().numel();
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

void halve(nn::ModuleBase& model) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) local_tensor(slot->persistent()).mul_(0.5);
}

/// Halves all parameters of a sharded model, in one way or another.
struct Write {
  const char* name;
  std::function<void(SmallModel& model, Rank& rank, const Path& folder)> act;
};

void PrintTo(const Write& write, std::ostream* out) {
  *out << write.name;
}

void halve_in_place(SmallModel& model, Rank&, const Path&) {
  halve(model);
}

void halve_as_distributed(SmallModel& model, Rank&, const Path&) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) slot->persistent().mul_(0.5);
}

void copy_halved(SmallModel& model, Rank& rank, const Path&) {
  ShardedModel other(hybrid_mesh(rank, 2, 2), kOverReplicas);
  halve(other);
  copy_parameters(other, model);
}

void load_halved(SmallModel& model, Rank& rank, const Path& folder) {
  ShardedModel other(hybrid_mesh(rank, 2, 2));
  halve(other);
  checkpoint::save_hugging_face(other, *rank.world(), folder, "{}");
  checkpoint::load_hugging_face(model, folder);
}

void convert_and_halve(SmallModel& model, Rank&, const Path&) {
  model.to(at::kDouble);
  halve(model);
  model.to(at::kFloat);
}

class WriteWithinAStep : public ::testing::TestWithParam<Write> {};

TEST_P(WriteWithinAStep, IsSeen) {
  SmallModel alone(testing::kDim, testing::kHidden, testing::kClasses);
  testing::fill(alone);
  halve(alone);
  const at::Tensor x = testing::batch(testing::kDim, 1);
  const at::Tensor expected = alone(x);
  const testing::TemporaryFolder folder;
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    set_is_last_backward(model, false);
    local_loss(model, rank).backward();
    GetParam().act(model, rank, folder.path());
    const c10::AutoGradMode no_grad(false);
    EXPECT_TRUE(model(x).allclose(expected, 1e-5, 1e-6));
    halve(model);
    const UnshardScope scope(model);
    EXPECT_TRUE(model.head->weight->allclose(alone.head->weight->mul(0.5), 1e-5, 1e-6));
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, WriteWithinAStep,
                         ::testing::Values(Write{"InPlace", halve_in_place},
                                           Write{"AsDistributed", halve_as_distributed},
                                           Write{"Copy", copy_halved}, Write{"Load", load_halved},
                                           Write{"Conversion", convert_and_halve}),
                         [](const auto& info) { return std::string(info.param.name); });

// The others' shards have not changed, or are empty.
TEST(ShardsOverReplicas, SeeAWriteOfOneRank) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(3, 3, {.bias = false});
    testing::fill(linear);
    fully_shard(linear, hybrid_mesh(rank, 2, 2), kOverReplicas);
    set_is_last_backward(linear, false);
    const at::Tensor x = at::eye(3);
    linear(x).sum().backward();
    const c10::AutoGradMode no_grad(false);
    if (rank.rank() == 1) local_tensor(linear.slot("weight")->persistent()).fill_(7);
    EXPECT_TRUE(linear(x).select(1, 1).equal(at::full({3}, 7.0)));
  });
}

// One tensor, which AdamW updates where it is.
TEST(ShardsOverReplicas, SeeAnOptimizerThatStepsBetweenMicroBatches) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(3, 5, {.bias = false});
    testing::fill(linear);
    fully_shard(linear, hybrid_mesh(rank, 2, 2), kOverReplicas);
    optim::AdamW optimizer(linear, {.lr = 0.1});
    set_requires_all_reduce(linear, false);
    linear(at::eye(3)).sum().backward();
    optimizer.step();
    EXPECT_TRUE(linear(at::eye(3)).t().equal(whole(linear.slot("weight")->persistent())));
  });
}

TEST(ShardsOverReplicas, SeeAWriteAfterAForwardWithoutBackward) {
  RunRanks(4, [](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    SmallModel alone(testing::kDim, testing::kHidden, testing::kClasses);
    testing::fill(alone);
    const at::Tensor x = testing::batch(testing::kDim, 0);
    for (const bool last : {true, false, true}) {
      set_is_last_backward(model, last);
      for (const bool grad : {false, true}) {
        const c10::AutoGradMode mode(grad);
        EXPECT_TRUE(model(x).allclose(alone(x), 1e-4, 1e-5)) << last << grad;
        halve(model);
        halve(alone);
      }
    }
  });
}

TEST(ShardsOverReplicas, SeeAWriteAfterAUnitWasCalledByItself) {
  RunRanks(4, [](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    SmallModel alone(testing::kDim, testing::kHidden, testing::kClasses);
    testing::fill(alone);
    const at::Tensor x = testing::batch(testing::kDim, 0);
    model(x).sum().backward();  // knows its root from now on
    const at::Tensor unused = (*model.blocks[0])(x);
    halve(model);
    halve(alone);
    EXPECT_TRUE(model(x).allclose(alone(x), 1e-4, 1e-5));
  });
}

// The stages of a pipeline: all forwards, then all backwards.
TEST(ShardsOverReplicas, AreGatheredOnceForSeveralForwards) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2),
                       {.reshard_after_forward = true, .shard_over_replicas = true});
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_is_last_backward(model, false);
    std::vector<at::Tensor> losses;
    for (int i = 0; i < 3; ++i) losses.push_back(local_loss(model, rank, i));
    losses[0].backward();
    losses[1].backward();
    set_is_last_backward(model, true);
    losses[2].backward();
    EXPECT_EQ(gathers(rank, before), (Gathers{4, 5 * 4}));
    expect_gradients(model, expected);
  });
}

/// Options under which gradients are those of one process.
class ShardOverReplicasWith : public ::testing::TestWithParam<std::pair<const char*, Options>> {};

at::Tensor doubled(const std::vector<at::Tensor>& tensors, const std::any&) {
  return tensors.front().mul(2);
}

std::optional<AllGatherExtension> sent_halved(const std::string&, const at::Tensor&) {
  return AllGatherExtension{
      [](const at::Tensor& shard) -> EncodedShard { return {.tensors = {shard.mul(0.5)}}; },
      doubled};
}

std::optional<Placement> last_dim(const std::string&, const at::Tensor& parameter) {
  return Shard{parameter.dim() - 1};
}

TEST_P(ShardOverReplicasWith, AccumulatesAsOneProcess) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(6, [&](Rank& rank) {
    Options options = GetParam().second;
    options.shard_over_replicas = true;
    ShardedModel model(hybrid_mesh(rank, 2, 3), options);
    const comm::TrafficTable before = rank.world()->traffic().table();
    for (int i = 0; i < 3; ++i) {
      set_is_last_backward(model, i == 2);
      local_loss(model, rank, i).backward();
    }
    EXPECT_EQ(gathers(rank, before).first, 4);
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Options, ShardOverReplicasWith,
    ::testing::Values(std::pair{"Zero2", Options{.reshard_after_forward = false}},
                      std::pair{"Zero3", Options{.reshard_after_forward = true}},
                      std::pair{"Offloaded", Options{.offload_policy = OffloadPolicy{}}},
                      std::pair{"Unused", Options{.may_be_unused = true}},
                      std::pair{"Packed", Options{.shard_placement = last_dim}},
                      std::pair{"Encoded", Options{.all_gather_extension = sent_halved}}),
    [](const auto& info) { return std::string(info.param.first); });

TEST(ShardsOverReplicas, AreSentAndKeptInTheTypeOfComputation) {
  RunRanks(4, [](Rank& rank) {
    Options options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    ShardedModel hybrid(hybrid_mesh(rank, 2, 2), options);
    options.shard_over_replicas = true;
    ShardedModel model(hybrid_mesh(rank, 2, 2), options);
    for (int i = 0; i < 3; ++i) {
      for (SmallModel* each :
           {static_cast<SmallModel*>(&hybrid), static_cast<SmallModel*>(&model)}) {
        set_is_last_backward(*each, i == 2);
        local_loss(*each, rank, i).backward();
      }
    }
    std::vector<at::Tensor> expected;
    for (const auto& [name, slot] : hybrid.named_slots())
      expected.push_back(whole(slot->persistent().grad()));
    expect_gradients(model, expected);
  });
}

TEST(ShardsOverReplicas, MayBeOfSomeUnitsOnly) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunRanks(4, [&](Rank& rank) {
    SmallModel model(testing::kDim, testing::kHidden, testing::kClasses);
    testing::fill(model);
    fully_shard(model, hybrid_mesh(rank, 2, 2),
                plan_units(model, wrap_class<testing::Block>({.shard_over_replicas = true})));
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_is_last_backward(model, false);
    local_loss(model, rank, 0).backward();
    set_is_last_backward(model, true);
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(gathers(rank, before), (Gathers{3, 9 + 2}));
    expect_gradients(model, expected);
  });
}

void expect_values(const nn::ModuleBase& model, double factor) {
  SmallModel alone(testing::kDim, testing::kHidden, testing::kClasses);
  testing::fill(alone);
  const auto expected = alone.named_slots();
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots())
    EXPECT_TRUE(whole(slot->persistent()).equal(expected[i++].second->get().detach() * factor))
        << name;
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
    EXPECT_THAT(ErrorOf([&] { fully_shard(linear, rank.mesh({4}, {"dp"}), kOverReplicas); }),
                HasSubstr("shard_over_replicas was asked for on DeviceMesh((dp=4), cpu)"));
    Options both = kOverReplicas;
    both.neighbours = 2;
    EXPECT_THAT(ErrorOf([&] { fully_shard(linear, hybrid_mesh(rank, 2, 2), both); }),
                HasSubstr("neighbours = 2 and shard_over_replicas"));
    EXPECT_THAT(ErrorOf([&] { replicate(linear, rank.mesh({4}, {"dp"}), kOverReplicas); }),
                HasSubstr("shard_over_replicas"));
    EXPECT_FALSE(tessera::is_distributed(linear.weight));
  });
}

}  // namespace
}  // namespace tessera::fsdp

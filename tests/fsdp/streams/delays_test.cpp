// A rank is late at some stage of a step: no rank may compute with data that have not arrived, so
// that no bit changes. PyTorch's test of FSDP2 does the same.

#include <chrono>
#include <cstdlib>
#include <optional>
#include <span>
#include <tuple>

#include "fsdp/training/training.h"
#include "testing/environment.h"
#include "testing/lateness.h"

namespace tessera::fsdp {
namespace {

using std::chrono::milliseconds;
using testing::Lateness;
using testing::Stage;

/// How a model's units are split over four ranks.
struct LateKind {
  const char* name;
  Options options{};
  bool replicas = false;    ///< two halves of two ranks (HSDP)
  bool replicated = false;  ///< every rank keeps all (replicate)
  bool prefetch = false;    ///< the next unit's gather starts ahead
  bool shared_memory = true;
};

void shard_late(SmallModel& model, const DeviceMesh& mesh, const LateKind& kind) {
  if (!kind.replicated) {
    return testing::shard(model, mesh, kind.options);
  }
  for (const auto& block : model.blocks) {
    replicate(*block, mesh, kind.options);
  }
  replicate(model, mesh, kind.options);
}

DeviceMesh mesh_of(const comm::WorldPtr& world, const LateKind& kind) {
  if (kind.replicas) {
    return init_device_mesh(world, {2, 2}, {"dp_replicate", "dp"});
  }
  return init_device_mesh(world, {world->size()}, {"dp"});
}

/// Within a block's forward and backward.
void delay_block(testing::Block& block, Lateness& lateness) {
  block.up->add_forward_hook([&lateness](nn::ModuleBase&, nn::TensorList outputs) {
    lateness.pass(Stage::kForward);
    outputs[0]->register_hook([&lateness](const at::Tensor&) { lateness.pass(Stage::kBackward); });
  });
}

/// Losses and whole parameters of two steps.
std::vector<at::Tensor> train_late(const Rank& rank, const LateKind& kind, Lateness& lateness) {
  Filled<SmallModel> model(7, 9, 3, 2);
  shard_late(model, mesh_of(lateness.world(), kind), kind);
  delay_block(*model.blocks[0], lateness);
  if (kind.prefetch) {
    set_forward_prefetch(*model.blocks[0], {model.blocks[1].get()});
  }
  std::vector<at::Tensor> results;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = local_loss(model, rank, step);
    loss.backward();
    results.push_back(loss.detach());
    lateness.pass(Stage::kStep);
    testing::descend(model, 0.1);
  }
  for (const auto& [name, slot] : model.named_slots()) {
    results.push_back(testing::full_tensor(slot->persistent()));
  }
  return results;
}

/// `late_ranks`: the ranks that are late, each in a separate training; nullopt: all by turns.
void expect_no_change(const LateKind& kind, Stage stage, milliseconds delay,
                      const std::vector<std::optional<int>>& late_ranks) {
  const testing::SharedMemory shared_memory(kind.shared_memory);
  RunRanks(4, [&](Rank& rank) {
    Lateness prompt(rank, Stage::kNone, delay);
    const std::vector<at::Tensor> expected = train_late(rank, kind, prompt);
    for (const std::optional<int> late_rank : late_ranks) {
      Lateness lateness(rank, stage, delay, late_rank);
      const std::vector<at::Tensor> values = train_late(rank, kind, lateness);
      EXPECT_GE(lateness.passed(), 2);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(values[i].equal(expected[i]));
      }
    }
  });
}

bool has_stage(const LateKind& kind, Stage stage) {
  if (stage == Stage::kAllReduce) {
    return kind.replicated || (kind.replicas && !kind.options.shard_over_replicas);
  }
  return !kind.replicated || (stage != Stage::kAllGather && stage != Stage::kReduceScatter);
}

const LateKind kLateKinds[] = {
    {.name = "Zero2", .options = {.reshard_after_forward = false}},
    {.name = "Zero3OverGloo", .options = {.reshard_after_forward = true}, .shared_memory = false},
    {.name = "Zero3OffloadedWithPrefetch",
     .options = {.offload_policy = OffloadPolicy{}, .reshard_after_forward = true},
     .prefetch = true},
    {.name = "Hpz", .options = {.reshard_after_forward = true, .post_forward_mesh_size = 2}},
    {.name = "Hsdp", .options = {.reshard_after_forward = true}, .replicas = true},
    {.name = "HsdpShardsOverReplicas",
     .options = {.reshard_after_forward = true, .shard_over_replicas = true},
     .replicas = true},
    {.name = "Replicate", .replicated = true},
};
const LateKind kMoreLateKinds[] = {
    {.name = "Zero3", .options = {.reshard_after_forward = true}},
    {.name = "Zero2OverGloo", .options = {.reshard_after_forward = false}, .shared_memory = false},
    {.name = "HsdpZero2OverGloo",
     .options = {.reshard_after_forward = false},
     .replicas = true,
     .shared_memory = false},
};
constexpr Stage kStages[] = {Stage::kForward,       Stage::kBackward,  Stage::kAllGather,
                             Stage::kReduceScatter, Stage::kAllReduce, Stage::kStep};

using LateCase = std::tuple<LateKind, Stage>;

std::vector<LateCase> late_cases(std::span<const LateKind> kinds) {
  std::vector<LateCase> cases;
  for (const LateKind& kind : kinds) {
    for (const Stage stage : kStages) {
      if (has_stage(kind, stage)) {
        cases.emplace_back(kind, stage);
      }
    }
  }
  return cases;
}

std::string name_of_late_case(const ::testing::TestParamInfo<LateCase>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + to_string(std::get<1>(info.param));
}

class Delays : public ::testing::TestWithParam<LateCase> {};

TEST_P(Delays, ATenthOfASecondOnAnyRankChangesNoBit) {
  const auto& [kind, stage] = GetParam();
  expect_no_change(kind, stage, milliseconds(100), {std::nullopt});
}

INSTANTIATE_TEST_SUITE_P(Stages, Delays, ::testing::ValuesIn(late_cases(kLateKinds)),
                         name_of_late_case);

/// The same rank is always late.
class ShortDelays : public ::testing::TestWithParam<LateCase> {};

TEST_P(ShortDelays, ChangeNoBit) {
  const auto& [kind, stage] = GetParam();
  expect_no_change(kind, stage, milliseconds(5), {0, 3});
}

INSTANTIATE_TEST_SUITE_P(Stages, ShortDelays, ::testing::ValuesIn(late_cases(kMoreLateKinds)),
                         name_of_late_case);

}  // namespace
}  // namespace tessera::fsdp

// Peaks of memory, held against the formulas of FSDP2's own memory test. In bytes of fp32: s the
// shards, b the largest block whole, u all blocks whole, n what is whole beside the blocks.

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"
#include "testing/memory/memory_scope.h"

namespace tessera::fsdp {
namespace {

using testing::MemoryScope;

constexpr std::int64_t kDim = 128, kHidden = 512, kClasses = 8, kDepth = 4, kRanks = 4;
constexpr std::int64_t kBlock = 4 * (2 * kDim * kHidden + kHidden + kDim);
constexpr std::int64_t kBeside = 4 * (kDim * kClasses + kClasses);
constexpr std::int64_t kAll = kDepth * kBlock + kBeside;
constexpr std::int64_t kShards = kAll / kRanks;
/// Activations, and what is small.
constexpr std::int64_t kSlack = kBlock / 4;

at::Tensor loss_of(SmallModel& model) {
  return model(testing::uniform_values({2, kDim}, 1)).square().mean();
}

std::shared_ptr<SmallModel> sharded(Rank& rank, const Options& options) {
  auto model = std::make_shared<SmallModel>(kDim, kHidden, kClasses, static_cast<int>(kDepth));
  testing::fill(*model);
  const DeviceMesh mesh = rank.mesh({kRanks}, {"dp"});
  testing::shard(*model, mesh, options);
  return model;
}

struct Peaks {
  std::int64_t init = 0, forward = 0, backward = 0, step = 0, zeroed = 0, deleted = 0;
};

/// The peaks of one rank's second step.
Peaks peaks(const Options& options, const std::function<void(SmallModel&)>& prepare = {}) {
  Peaks peaks;
  RunRanks(kRanks, [&](Rank& rank) {
    MemoryScope memory;
    auto model = sharded(rank, options);
    if (prepare) {
      prepare(*model);
    }
    Peaks own{.init = memory.bytes()};
    {
      optim::AdamW optimizer(*model, {});
      for (int step = 0; step < 2; ++step) {
        memory.reset_peak();
        at::Tensor loss = loss_of(*model);
        own.forward = memory.peak();
        memory.reset_peak();
        loss.backward();
        loss.reset();
        own.backward = memory.peak();
        optimizer.step();
        own.step = memory.bytes();
        optimizer.zero_grad();
        own.zeroed = memory.bytes();
      }
    }
    model.reset();
    own.deleted = memory.bytes();
    if (rank.rank() == 0) {
      peaks = own;
    }
  });
  return peaks;
}

// The optimizer's state, 2 s, is there in the second step's forward and backward.
void expect_zero3(const Peaks& p) {
  EXPECT_LE(p.init, kShards + kBlock);
  EXPECT_LE(p.forward, 3 * kShards + 3 * kBlock + kBeside + kSlack);
  EXPECT_LE(p.backward, 4 * kShards + 3 * kBlock + kBeside + kSlack);
  EXPECT_LE(p.step, 4 * kShards + kSlack);
  EXPECT_LE(p.zeroed, 3 * kShards + kSlack);
}

TEST(Memory, Zero3StaysWithinItsBound) {
  expect_zero3(peaks({}));
}

TEST(Memory, Zero3WithPackedGroupsStaysWithinItsBound) {
  expect_zero3(peaks({.shard_placement = [](const std::string&, const at::Tensor& parameter) {
    return std::optional<Placement>(Shard{parameter.dim() - 1});
  }}));
}

TEST(Memory, Zero3WithPrefetchStaysWithinItsBound) {
  expect_zero3(peaks({}, [](SmallModel& model) {
    for (std::size_t i = 0; i + 1 < model.blocks.size(); ++i) {
      set_forward_prefetch(*model.blocks[i], {model.blocks[i + 1].get()});
    }
  }));
}

TEST(Memory, Zero2StaysWithinItsBound) {
  const Peaks p = peaks({.reshard_after_forward = false});
  EXPECT_LE(p.forward, 3 * kShards + kAll + kBlock + kSlack);
  EXPECT_LE(p.backward, 3 * kShards + kAll + 3 * kBlock / 2 + kSlack);
  EXPECT_LE(p.zeroed, 3 * kShards + kSlack);
}

/// With lanes, memory that another lane has used is kept until an event: as on CUDA.
void with_lanes(SmallModel& model) {
  testing::record(model);
}

// What is reduced is kept for as long as the next unit's backward runs beside it.
void expect_zero3_with_lanes(const Options& options) {
  const Peaks p = peaks(options, with_lanes);
  EXPECT_LE(p.forward, 3 * kShards + 3 * kBlock + kBeside + kSlack);
  EXPECT_LE(p.backward, 4 * kShards + 4 * kBlock + kBeside + kSlack);
  EXPECT_LE(p.step, 4 * kShards + kSlack);
}

TEST(Memory, Zero3WithLanesStaysWithinItsBound) {
  expect_zero3_with_lanes({});
}

TEST(Memory, Zero3WithLanesAndPackedGroupsStaysWithinItsBound) {
  expect_zero3_with_lanes({.shard_placement = [](const std::string&, const at::Tensor& parameter) {
    return std::optional<Placement>(Shard{parameter.dim() - 1});
  }});
}

// No gather takes the memory that backward leaves: it is freed, and not kept for one.
TEST(Memory, Zero2WithLanesStaysWithinItsBound) {
  const Peaks p = peaks({.reshard_after_forward = false}, with_lanes);
  EXPECT_LE(p.forward, 3 * kShards + kAll + kBlock + kSlack);
  EXPECT_LE(p.backward, 3 * kShards + kAll + 3 * kBlock / 2 + kSlack);
  EXPECT_LE(p.zeroed, 3 * kShards + kSlack);
}

TEST(Memory, Zero3TakesLessThanZero2) {
  EXPECT_LT(peaks({}).forward + kBlock, peaks({.reshard_after_forward = false}).forward);
}

TEST(Memory, IsAllFreedWithTheModel) {
  EXPECT_LE(peaks({}).deleted, 4096);
  EXPECT_LE(peaks({.offload_policy = OffloadPolicy{}}).deleted, 4096);
}

TEST(Memory, Bfloat16HalvesWhatIsGathered) {
  const Peaks p = peaks({.mp_policy = {.param_dtype = at::kBFloat16}});
  // The cast of a block's shards is sent.
  EXPECT_LE(p.forward, 3 * kShards + (3 * kBlock + kBeside) / 2 + kSlack);
}

}  // namespace
}  // namespace tessera::fsdp

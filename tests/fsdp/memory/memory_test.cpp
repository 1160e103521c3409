// Tests the peak memory of a step against the formulas of FSDP2's memory test, and offload to CPU
// memory. Bytes in fp32: kBlock, a block; kOutside, the parameters outside of blocks; kAll, all;
// kShards, one rank's shards.

#include "testing/memory.h"
#include "fsdp/recording_streams.h"
#include "fsdp/training/training.h"
#include "tessera/optim/adamw.h"

namespace tessera::fsdp::memory {

using testing::MemoryScope;

constexpr std::int64_t kWide = 128, kInner = 512, kOut = 8, kDepth = 4, kRanks = 4;
constexpr std::int64_t kBlock = 4 * (2 * kWide * kInner + kInner + kWide);
constexpr std::int64_t kOutside = 4 * (kWide * kOut + kOut);
constexpr std::int64_t kAll = kDepth * kBlock + kOutside;
constexpr std::int64_t kShards = kAll / kRanks;
constexpr std::int64_t kSlack = kBlock / 4;

struct Peaks {
  std::int64_t init = 0, forward = 0, backward = 0, step = 0, zeroed = 0, deleted = 0;
};

/// Returns the memory peaks of rank 0 in the second step. `prepare` changes the sharded model.
Peaks peaks(const Options& options, const std::function<void(SmallModel&)>& prepare = {}) {
  Peaks peaks;
  RunRanks(kRanks, [&](Rank& rank) {
    MemoryScope memory;
    auto model =
        std::make_shared<Filled<SmallModel>>(kWide, kInner, kOut, static_cast<int>(kDepth));
    shard(*model, rank.mesh({kRanks}, {"dp"}), options);
    if (prepare) {
      prepare(*model);
    }
    Peaks own{.init = memory.bytes()};
    {
      optim::AdamW optimizer(*model, {});
      for (int step = 0; step < 2; ++step) {
        memory.reset_peak();
        at::Tensor loss = (*model)(uniform_values({2, kWide}, 1)).square().mean();
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

void prefetch_next_block(SmallModel& model) {
  for (std::size_t i = 0; i + 1 < model.blocks.size(); ++i) {
    set_forward_prefetch(*model.blocks[i], {model.blocks[i + 1].get()});
  }
}

/// RecordingStreams make FSDP use several streams, as on CUDA.
void with_lanes(SmallModel& model) {
  record(model);
}

// All peaks include the state of AdamW (2 * kShards bytes), which the first step creates.
TEST(Memory, Zero3StaysWithinItsBound) {
  struct Case {
    const char* name;
    Options options;
    void (*prepare)(SmallModel&);
  };
  const Options columns{.shard_placement = by_columns};
  for (const Case& c : {Case{"plain", {}, nullptr}, Case{"packed groups", columns, nullptr},
                        Case{"prefetch", {}, prefetch_next_block}, Case{"lanes", {}, with_lanes},
                        Case{"packed groups with lanes", columns, with_lanes}}) {
    SCOPED_TRACE(c.name);
    const Peaks p = peaks(c.options, c.prepare);
    // With several streams, a unit's reduced gradients are freed in the next unit's backward.
    const std::int64_t blocks = c.prepare == with_lanes ? 4 : 3;
    EXPECT_LE(p.init, kShards + kBlock);
    EXPECT_LE(p.forward, 3 * kShards + 3 * kBlock + kOutside + kSlack);
    EXPECT_LE(p.backward, 4 * kShards + blocks * kBlock + kOutside + kSlack);
    EXPECT_LE(p.step, 4 * kShards + kSlack);
    EXPECT_LE(p.zeroed, 3 * kShards + kSlack);
  }
}

TEST(Memory, Zero2StaysWithinItsBound) {
  for (const auto prepare : {+[](SmallModel&) {}, with_lanes}) {
    const Peaks p = peaks({.reshard_after_forward = false}, prepare);
    EXPECT_LE(p.forward, 3 * kShards + kAll + kBlock + kSlack);
    EXPECT_LE(p.backward, 3 * kShards + kAll + 3 * kBlock / 2 + kSlack);
    EXPECT_LE(p.zeroed, 3 * kShards + kSlack);
  }
}

TEST(Memory, IsFreedWithTheModel) {
  EXPECT_LE(peaks({}).deleted, 4096);
  EXPECT_LE(peaks({.offload_policy = OffloadPolicy{}}).deleted, 4096);
}

TEST(Memory, OfGatheredParametersIsHalvedByBfloat16) {
  const Peaks p = peaks({.mp_policy = {.param_dtype = at::kBFloat16}});
  EXPECT_LE(p.forward, 3 * kShards + (3 * kBlock + kOutside) / 2 + kSlack);
}

// With offload_policy, shards, gradients and optimizer state are in CPU memory.

const Options kOffload{.offload_policy = OffloadPolicy{}};

TEST(Offload, KeepsShardsAndGradientsOnTheHost) {
  for (const auto type : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    Options options = kOffload;
    options.mp_policy = {.param_dtype = type, .reduce_dtype = at::kFloat};
    RunSharded(2, options, [](Rank& rank, ShardedModel& model) {
      local_loss(model, rank).backward();
      for (const at::Tensor& parameter : parameters_of(model)) {
        EXPECT_TRUE(local_tensor(parameter).device().is_cpu());
        EXPECT_TRUE(local_tensor(parameter.grad()).device().is_cpu());
        EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
      }
    });
  }
}

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

/// Gradients are copied to CPU memory asynchronously, so the CPU must wait for the copies.
TEST_ON_RANKS(Offload, AddsGradientsAndCallsHooksAfterTheCopy, 2) {
  ShardedModel model(rank.mesh({2}, {"dp"}), kOffload, {4, 6, 3});
  const at::Tensor weight = model.head->slot("weight")->persistent();
  int calls = 0;
  testing::after_accumulation(weight, [&](const at::Tensor&) { ++calls; });
  std::vector<at::Tensor> found;
  std::vector<int> called;
  model.attached<Unit>()->set_comm_context(
      std::make_shared<CommContext>(std::make_shared<HostWaits>([&] {
                                      found.push_back(local_tensor(weight.grad()).clone());
                                      called.push_back(calls);
                                    }),
                                    at::kCPU));
  local_loss(model, rank, 0).backward();
  const at::Tensor first = local_tensor(weight.grad()).clone();
  local_loss(model, rank, 1).backward();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(at::equal(found[1], first));
  EXPECT_FALSE(at::equal(local_tensor(weight.grad()), first));
  EXPECT_EQ(called, (std::vector<int>{0, 1}));
  EXPECT_EQ(calls, 2);
}

TEST_ON_RANKS(Offload, DropsGradientsOfAFailedBackward, 2) {
  ShardedModel model(rank.mesh({2}, {"dp"}), kOffload, {4, 6, 3});
  const auto step = [&] {
    local_loss(model, rank, 0).backward();
    return take_gradients(model);
  };
  const std::vector<at::Tensor> expected = step();
  // The second backward throws in the hook of the model's input, after most reductions have begun.
  local_loss(model, rank, 0).backward();
  const at::Tensor x = batch(4, 1).requires_grad_();
  x.register_hook([](const at::Tensor&) -> at::Tensor { throw Error("planted"); });
  const std::int64_t rows = kRows / rank.size();
  const at::Tensor loss = fsdp::loss_of(model, x, rank.rank() * rows, rows);
  EXPECT_ERROR(loss.backward(), "planted");
  drop_gradients(model);
  EXPECT_EACH(step(), expected);
}

}  // namespace tessera::fsdp::memory

// Buffers of a unit's collectives in memory of the caller's.

#include <algorithm>

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit/unit.h"
#include "tessera/fsdp/collectives.h"

namespace tessera::fsdp {
namespace {

using Log = std::vector<std::string>;

/// Knows what it has allocated.
struct Memory {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> blocks;
  std::vector<c10::ScalarType> types;

  AllocateBuffer allocator() {
    return [this](comm::Communicator&, std::int64_t numel, const c10::TensorOptions& options) {
      const at::Tensor tensor = at::empty({numel}, options);
      blocks.push_back(tensor.storage().getWeakStorageImpl());
      types.push_back(tensor.scalar_type());
      return tensor;
    };
  }
  bool holds(const at::Tensor& tensor) const {
    return std::ranges::any_of(blocks, [&](const auto& block) {
      const auto storage = block.lock();
      return storage.defined() && storage.get() == tensor.storage().unsafeGetStorageImpl();
    });
  }
  int alive() const {
    return static_cast<int>(
        std::ranges::count_if(blocks, [](const auto& block) { return !block.expired(); }));
  }
};

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(a[i].equal(b[i])) << i;
  }
}

class AllocatorOf : public ::testing::TestWithParam<Arrangement> {};

TEST_P(AllocatorOf, AllocatesTheBuffersOfCustomCollectives) {
  const Arrangement& c = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(c.sizes)), [&](Rank& rank) {
    ShardedModel model(rank.mesh(c.sizes, c.names), c.options);
    local_loss(model, rank).backward();
    const std::vector<at::Tensor> expected = take_gradients(model);
    Memory gathers, reductions;
    int calls = 0;
    set_custom_all_gather(
        model,
        [&](auto& group, const auto& output, const auto& input) {
          EXPECT_TRUE(gathers.holds(output) && gathers.holds(input));
          ++calls;
          return group.all_gather(output, input);
        },
        gathers.allocator());
    set_custom_reduce_scatter(
        model,
        [&](auto& group, const auto& output, const auto& input) {
          EXPECT_TRUE(reductions.holds(output) && reductions.holds(input));
          ++calls;
          return group.reduce_scatter(output, input, ReduceOp::kSum);
        },
        reductions.allocator());
    local_loss(model, rank).backward();
    EXPECT_EQ(calls, 7 + 4);
    const MixedPrecisionPolicy& types = c.options.mp_policy;
    EXPECT_EQ(gathers.types.front(), types.param_dtype.value_or(at::kFloat));
    EXPECT_EQ(reductions.types.front(), types.reduce_dtype.value_or(at::kFloat));
    expect_equal(take_gradients(model), expected);
    EXPECT_EQ(gathers.alive() + reductions.alive(), 0);
    set_custom_all_gather(model, {});
    set_custom_reduce_scatter(model, {});
    const std::size_t allocations = gathers.blocks.size() + reductions.blocks.size();
    local_loss(model, rank).backward();
    EXPECT_EQ(gathers.blocks.size() + reductions.blocks.size(), allocations);
  });
}

TEST_P(AllocatorOf, ServesTheCommunicatorsCollectives) {
  const Arrangement& c = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(c.sizes)), [&](Rank& rank) {
    ShardedModel model(rank.mesh(c.sizes, c.names), c.options);
    local_loss(model, rank).backward();
    const std::vector<at::Tensor> expected = take_gradients(model);
    Memory gathers, reductions;
    set_custom_all_gather(model, {}, gathers.allocator());
    set_custom_reduce_scatter(model, {}, reductions.allocator());
    local_loss(model, rank).backward();
    EXPECT_GT(gathers.blocks.size(), 0u);
    EXPECT_GT(reductions.blocks.size(), 0u);
    expect_equal(take_gradients(model), expected);
    EXPECT_EQ(gathers.alive() + reductions.alive(), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Modes, AllocatorOf,
    ::testing::Values(Arrangement{"Plain", {4}, {"dp"}}, Arrangement{"Three", {3}, {"dp"}},
                      Arrangement{"Hsdp", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"Bf16",
                                  {4},
                                  {"dp"},
                                  {.mp_policy = {.param_dtype = at::kBFloat16,
                                                 .reduce_dtype = at::kFloat}}},
                      Arrangement{"Offloaded", {4}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Allocator, ServesOneUnitAfterTheOther) {
  RunOnMesh({3}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    ShardedModel model(mesh, {}, {32, 64, 4});
    Memory memory;
    set_custom_all_gather(model, {}, memory.allocator());
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    // What is sent and what is received, of the root and of three blocks of one size.
    EXPECT_EQ(memory.blocks.size(), 4u);
    EXPECT_EQ(memory.alive(), 0);
  });
}

TEST(Allocator, ServesReplicas) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(3, [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate(model, rank.mesh({3}, {"dp"}));
    Memory memory;
    set_custom_reduce_scatter(model, {}, memory.allocator());
    local_loss(model, rank).backward();
    EXPECT_EQ(memory.blocks.size(), 2u);
    testing::expect_gradients(model, expected);
  });
}

/// Notes in `streams` when it is freed.
AllocateBuffer noting(const std::shared_ptr<testing::RecordingStreams>& streams,
                      const std::string& name) {
  return [streams, name](auto&, std::int64_t numel, const c10::TensorOptions& options) {
    const at::Tensor memory = at::empty({numel}, options);
    return at::from_blob(
        memory.data_ptr(), {numel}, [streams, name, memory](void*) { streams->note(name); },
        options);
  };
}

/// The event that `lane` waited for last before the first line `line`.
std::string waited_before(const Log& log, const std::string& lane, const std::string& line) {
  const std::string wait = lane + ": wait ";
  const auto end = std::ranges::find(log, line);
  std::string last;
  for (auto entry = log.begin(); entry != end; ++entry) {
    if (entry->starts_with(wait)) {
      last = entry->substr(wait.size());
    }
  }
  return last;
}

TEST(Allocator, IsGivenBackMemoryAfterItsReaders) {
  RunRanks(3, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 7, {.bias = false});
    fully_shard(linear, rank.mesh({3}, {"dp"}));
    const auto streams = testing::record(linear);
    set_custom_all_gather(linear, {}, noting(streams, "free gather"));
    set_custom_reduce_scatter(linear, {}, noting(streams, "free reduction"));
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    const Log& log = streams->log();
    // Unpacked by the compute lane; sent by the reduce-scatter lane.
    const auto unpacked = "compute: record " + waited_before(log, "all_gather", "free gather");
    EXPECT_GT(std::ranges::find(log, unpacked), std::ranges::find(log, "unshard the root unit"));
    const auto sent = "reduce_scatter: record " + waited_before(log, "compute", "free reduction");
    EXPECT_NE(std::ranges::find(log, sent), log.end());
    EXPECT_EQ(std::ranges::count(log, "free gather"), 2);
    EXPECT_EQ(std::ranges::count(log, "free reduction"), 1);  // the gradient is the other
    linear.slot("weight")->persistent().mutable_grad().reset();
    EXPECT_EQ(std::ranges::count(log, "free reduction"), 2);
  });
}

class BadAllocator : public ::testing::TestWithParam<AllocateBuffer> {};

TEST_P(BadAllocator, IsAnError) {
  const std::vector<std::string> errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}));
    set_custom_all_gather(model, {}, GetParam());
    local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors, "allocator of a custom collective returned");
}

INSTANTIATE_TEST_SUITE_P(
    Returns, BadAllocator,
    ::testing::Values([](auto&, auto, const auto&) { return at::Tensor(); },
                      [](auto&, auto n, const auto& options) {
                        return at::empty({n + 1}, options);
                      },
                      [](auto&, auto n, const auto& options) {
                        return at::empty({2 * n}, options).slice(0, 0, 2 * n, 2);
                      },
                      [](auto&, auto n, const auto&) { return at::empty({n}, at::kDouble); }));

TEST(Allocator, IsRefusedBesideMemoryOfTheGroup) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::shard(model, rank.mesh({1}, {"dp"}));
    Memory memory;
    const auto allocate = [&] { set_allocate_memory_from_process_group_for_comm(model, true); };
    set_custom_all_gather(*model.blocks[1], {}, memory.allocator());
    EXPECT_ERROR(allocate(), "set_allocate_memory_from_process_group_for_comm");
    set_custom_all_gather(model, {});
    set_custom_reduce_scatter(*model.blocks[1], {}, memory.allocator());
    EXPECT_ERROR(allocate(), "set_allocate_memory_from_process_group_for_comm");
    set_custom_reduce_scatter(model, {});
    allocate();
    EXPECT_ERROR(set_custom_all_gather(model, {}, memory.allocator()), "process group");
    EXPECT_ERROR(set_custom_reduce_scatter(model, {}, memory.allocator()), "process group");
  });
}

}  // namespace
}  // namespace tessera::fsdp

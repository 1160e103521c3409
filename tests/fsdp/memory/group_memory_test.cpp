// Communication buffers in memory that the groups allocate.

#include <cstdlib>
#include <map>

#include "fsdp/training/training.h"
#include "tessera/fsdp/collectives.h"
#include "testing/forwarding_communicator.h"
#include "testing/wrapped_world.h"

namespace tessera::fsdp {
namespace {

/// What a group has allocated: where it begins and ends.
struct GroupMemory {
  int allocations = 0;
  std::map<const char*, const char*> alive;

  bool holds(const at::Tensor& tensor) const {
    const auto* first = static_cast<const char*>(tensor.const_data_ptr());
    auto block = alive.upper_bound(first);
    if (block == alive.begin()) {
      return false;
    }
    --block;
    return first + tensor.nbytes() <= block->second;
  }
};

/// A group that knows its memory, and whether its collectives keep to it.
class AllocatingGroup final : public testing::ForwardingCommunicator {
 public:
  AllocatingGroup(comm::CommunicatorPtr inner, std::shared_ptr<GroupMemory> memory)
      : ForwardingCommunicator(std::move(inner)), memory_(std::move(memory)) {}

  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    const auto bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
    auto* first = static_cast<char*>(std::malloc(bytes));
    ++memory_->allocations;
    memory_->alive[first] = first + bytes;
    const auto free_block = [memory = memory_](void* block) {
      memory->alive.erase(static_cast<const char*>(block));
      std::free(block);
    };
    return at::from_blob(first, {numel}, free_block, options);
  }
  comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    note({output, input});
    return inner().all_gather(output, input);
  }
  comm::WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs) override {
    note(outputs);
    return inner().all_gather_group(outputs, inputs);
  }
  comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                               ReduceOp op) override {
    note({output, input});
    return inner().reduce_scatter(output, input, op);
  }
  comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    note(outputs);
    return inner().reduce_scatter_group(outputs, inputs, op);
  }

  int within = 0;   ///< collectives of units in this group's memory
  int outside = 0;  ///< and those that are not

 private:
  void note(const std::vector<at::Tensor>& tensors) {
    if (purpose().empty()) {
      return;
    }
    for (const at::Tensor& tensor : tensors) {
      ++(memory_->holds(tensor) ? within : outside);
    }
  }

  std::shared_ptr<GroupMemory> memory_;
};

/// A rank's groups, by name, and their memory.
struct AllocatingWorld {
  explicit AllocatingWorld(const Rank& rank)
      : world(std::make_shared<testing::WrappedWorld>(
            rank.world(), [this](comm::CommunicatorPtr inner, const std::string& name) {
              memory[name] = std::make_shared<GroupMemory>();
              groups[name] = std::make_shared<AllocatingGroup>(std::move(inner), memory[name]);
              return groups[name];
            })) {}

  int within() const { return sum(&AllocatingGroup::within); }
  int outside() const { return sum(&AllocatingGroup::outside); }
  int sum(int AllocatingGroup::*count) const {
    int all = 0;
    for (const auto& [name, group] : groups) {
      all += (*group).*count;
    }
    return all;
  }
  std::size_t alive() const {
    std::size_t all = 0;
    for (const auto& [name, blocks] : memory) {
      all += blocks->alive.size();
    }
    return all;
  }

  std::map<std::string, std::shared_ptr<GroupMemory>> memory;
  std::map<std::string, std::shared_ptr<AllocatingGroup>> groups;
  comm::WorldPtr world;
};

class GroupMemoryOf : public ::testing::TestWithParam<Arrangement> {};

TEST_P(GroupMemoryOf, HoldsSentAndReceivedDataOnlyOnRequest) {
  const Arrangement& c = GetParam();
  RunRanks(4, [&](Rank& rank) {
    AllocatingWorld groups(rank);
    testing::ShardedModel model(init_device_mesh(groups.world, c.sizes, c.names), c.options);
    local_loss(model, rank).backward();
    const std::vector<at::Tensor> expected = take_gradients(model);
    EXPECT_EQ(groups.within(), 0);
    set_allocate_memory_from_process_group_for_comm(model, true);
    const int outside = groups.outside();
    local_loss(model, rank).backward();
    const std::vector<at::Tensor> gradients = take_gradients(model);
    EXPECT_EQ(groups.outside(), outside);
    EXPECT_EQ(groups.within(), 2 * (7 + 4));  // both ends of 7 gathers and 4 reductions
    EXPECT_EQ(groups.alive(), 0u);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(gradients[i].equal(expected[i]));
    }
    set_allocate_memory_from_process_group_for_comm(model, false);
    local_loss(model, rank).backward();
    EXPECT_EQ(groups.within(), 2 * (7 + 4));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Modes, GroupMemoryOf,
    ::testing::Values(
        Arrangement{"Plain", {4}, {"dp"}}, Arrangement{"Hsdp", {2, 2}, {"replicate", "shard"}},
        Arrangement{"Bf16",
                    {4},
                    {"dp"},
                    {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
        Arrangement{"Offloaded", {4}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(GroupMemory, ServesOneUnitAfterTheOther) {
  RunRanks(4, [](Rank& rank) {
    AllocatingWorld groups(rank);
    testing::ShardedModel model(init_device_mesh(groups.world, {4}, {"dp"}), {}, {32, 64, 4});
    set_allocate_memory_from_process_group_for_comm(model, true);
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    // What is sent and what is received, of the root and of three blocks of one size.
    EXPECT_EQ(groups.memory["dp"]->allocations, 4);
    EXPECT_EQ(groups.alive(), 0u);
  });
}

TEST(GroupMemory, BelongsToTheParametersMesh) {
  RunRanks(4, [](Rank& rank) {
    AllocatingWorld groups(rank);
    const DeviceMesh mesh = init_device_mesh(groups.world, {2, 2}, {"ep", "efsdp"});
    Filled<nn::Linear> linear(kDim, kHidden);
    fully_shard(linear, mesh.flatten("dp"),
                {.parameter_mesh = [&](const std::string& name,
                                       const at::Tensor&) -> std::optional<DeviceMesh> {
                  if (name == "bias") {
                    return mesh["efsdp"];
                  }
                  return std::nullopt;
                }});
    set_allocate_memory_from_process_group_for_comm(linear, true);
    linear(testing::batch(kDim, 0)).sum().backward();
    for (const char* name : {"dp", "efsdp"}) {
      EXPECT_EQ(groups.groups.at(name)->within, 4) << name;
      EXPECT_EQ(groups.groups.at(name)->outside, 0) << name;
    }
  });
}

TEST(GroupMemory, HoldsTheSumsOfReplicas) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(3, [&](Rank& rank) {
    AllocatingWorld groups(rank);
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate(model, init_device_mesh(groups.world, {3}, {"dp"}));
    set_allocate_memory_from_process_group_for_comm(model, true);
    local_loss(model, rank).backward();
    EXPECT_GT(groups.memory["dp"]->allocations, 0);
    testing::expect_gradients(model, expected);
    take_gradients(model);
    EXPECT_EQ(groups.alive(), 0u);
  });
}

TEST(GroupMemory, IsRefusedBesideACustomCollective) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    shard(model, rank.mesh({1}, {"dp"}));
    const AllGather gather = [](auto& group, const auto& output, const auto& input) {
      return group.all_gather(output, input);
    };
    const ReduceScatter reduce = [](auto& group, const auto& output, const auto& input) {
      return group.reduce_scatter(output, input, ReduceOp::kSum);
    };
    const auto allocate = [](SmallModel& to, bool on) {
      set_allocate_memory_from_process_group_for_comm(to, on);
    };
    set_custom_all_gather(*model.blocks[1], gather);
    EXPECT_ERROR(allocate(model, true), "set_allocate_memory_from_process_group_for_comm");
    set_custom_all_gather(model, {});
    set_custom_reduce_scatter(*model.blocks[2], reduce);
    EXPECT_ERROR(allocate(model, true), "its own collective");
    allocate(model, false);  // nothing to refuse
    set_custom_reduce_scatter(model, {});
    allocate(model, true);
    EXPECT_ERROR(set_custom_all_gather(model, gather), "set_custom_all_gather");
    EXPECT_ERROR(set_custom_reduce_scatter(model, reduce), "memory of the process group");
    set_custom_all_gather(model, {});
    allocate(model, false);
    set_custom_all_gather(model, gather);
  });
}

}  // namespace
}  // namespace tessera::fsdp

// Buffers and inputs on the device of computation. "meta" stands for one that is not the CPU.
#include "fsdp/unit.h"

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

/// A module of libtorch's own kind.
struct Counter : torch::nn::Module {
  Counter() { counts = register_buffer("counts", at::ones({2}, at::kDouble)); }
  at::Tensor counts;
};

/// Buffers of two types, and below it.
class Buffered : public nn::Module<Buffered> {
 public:
  explicit Buffered(bool leaf = false) {
    mask = register_buffer_slot("mask", {3});
    steps = register_buffer_slot("steps", {2});
    steps.slot()->set(at::ones({2}, at::kLong));
    weight = register_slot("weight", {5, 3});
    if (!leaf) {
      below = register_module("below", std::make_shared<Buffered>(true));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = x;
    return x.matmul((*weight).t());
  }

  nn::Parameter mask, steps, weight;
  at::Tensor seen;
  std::shared_ptr<Buffered> below;
};

bool all_on(const Buffered& module, c10::Device device) {
  return module.mask->device() == device && module.steps->device() == device;
}

TEST(MoveBuffers, MovesAllTypes) {
  Buffered module;
  move_buffers({&module}, at::kMeta, {});
  EXPECT_TRUE(all_on(module, at::kMeta));
  EXPECT_TRUE(all_on(*module.below, at::kMeta));
  EXPECT_EQ(module.steps->scalar_type(), at::kLong);
  EXPECT_TRUE(module.weight->is_cpu());
}

TEST(MoveBuffers, LeavesMetaBuffersWhereTheyAre) {
  Buffered module;
  move_buffers({&module}, at::kMeta, {});
  move_buffers({&module}, at::kCPU, {});
  EXPECT_TRUE(all_on(module, at::kMeta));
}

TEST(MoveBuffers, LeavesIgnoredOnes) {
  Buffered module;
  move_buffers({&module}, at::kMeta, {module.below->mask.slot()});
  EXPECT_TRUE(module.mask->is_meta());
  EXPECT_TRUE(module.below->mask->is_cpu());
  EXPECT_TRUE(module.below->steps->is_meta());
}

TEST(MoveBuffers, LeavesUnitsBelow) {
  RunRanks(3, [](Rank& rank) {
    Buffered module;
    fully_shard(*module.below, rank.world());
    move_buffers({&module}, at::kMeta, {});
    EXPECT_TRUE(all_on(module, at::kMeta));
    EXPECT_TRUE(all_on(*module.below, at::kCPU));
  });
}

TEST(MoveBuffers, CopiesNothingWhereTheyAreInPlace) {
  RunRanks(3, [](Rank& rank) {
    for (const auto wrap : {+[](Buffered& to, const Rank& by) { fully_shard(to, by.world()); },
                            +[](Buffered& to, const Rank& by) { replicate(to, by.world()); }}) {
      Buffered module;
      const auto counter = module.register_module("counter", std::make_shared<Counter>());
      const at::Tensor mask = module.mask, steps = module.steps, counts = counter->counts;
      const void* memory = counts.data_ptr();
      wrap(module, rank);
      EXPECT_TRUE(mask.is_same(module.mask));
      EXPECT_TRUE(steps.is_same(module.steps));
      EXPECT_TRUE(counts.is_same(counter->buffers()[0]));
      EXPECT_EQ(counts.data_ptr(), memory);
      EXPECT_EQ(counts.scalar_type(), at::kDouble);
    }
  });
}

TEST(MoveBuffers, LeavesAMetaModelsForToEmpty) {
  RunRanks(3, [](Rank& rank) {
    Buffered module;
    move_buffers({&module}, at::kMeta, {});
    fully_shard(module, rank.world());
    EXPECT_TRUE(all_on(module, at::kMeta));
  });
}

TEST(MoveInputs, MovesWhatIsElsewhere) {
  at::Tensor here = at::ones({2}), there = at::empty({2}, at::device(at::kMeta)), none;
  const at::Tensor same = here;
  std::vector<at::Tensor*> inputs{&here, &there, &none};
  move_inputs(inputs, at::kCPU);
  EXPECT_TRUE(here.is_same(same));
  EXPECT_TRUE(there.is_meta());
  move_inputs(inputs, at::kMeta);
  EXPECT_TRUE(here.is_meta());
  EXPECT_FALSE(none.defined());
}

TEST(MoveInputs, IsDifferentiable) {
  at::Tensor input = at::ones({2}).requires_grad_();
  std::vector<at::Tensor*> inputs{&input};
  move_inputs(inputs, at::kMeta);
  EXPECT_TRUE(input.requires_grad());
  EXPECT_FALSE(input.is_leaf());
}

TEST(MoveInputs, LeavesDistributedTensors) {
  RunRanks(3, [](Rank& rank) {
    at::Tensor input = distribute_tensor(at::ones({5}), world_mesh(rank.world()), {Shard{0}});
    const at::Tensor same = input;
    std::vector<at::Tensor*> inputs{&input};
    move_inputs(inputs, at::kMeta);
    EXPECT_TRUE(input.is_same(same));
  });
}

TEST(MoveInputs, CopiesNothingOfARootsInputsInPlace) {
  RunRanks(3, [](Rank& rank) {
    Filled<Buffered> module;
    module.mask->zero_();
    module.below->mask->zero_();
    fully_shard(module, rank.world());
    const at::Tensor input = testing::uniform_values({2, 3}, rank.rank());
    module(input).sum().backward();
    EXPECT_TRUE(module.seen.is_same(input));
  });
}

}  // namespace
}  // namespace tessera::fsdp

#include "tessera/optim/adamw.h"

#include <torch/optim/adamw.h>

#include <tuple>

#include "optim/parameters.h"
#include "tessera/nn/linear.h"

namespace tessera::optim {
namespace {

const AdamWOptions kOptions{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

at::Tensor initial(std::size_t i) {
  return normal_values(kSizes[i], 100 + static_cast<std::int64_t>(i));
}

at::Tensor gradient(std::size_t i, int step) {
  return normal_values(kSizes[i], 1000 * (step + 1) + static_cast<std::int64_t>(i));
}

/// Four steps of libtorch's AdamW on plain tensors.
std::vector<at::Tensor> expected() {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    parameters.push_back(initial(i).clone().requires_grad_());
  }
  torch::optim::AdamW reference(parameters, torch::optim::AdamWOptions(kOptions.lr)
                                                .betas({kOptions.beta1, kOptions.beta2})
                                                .eps(kOptions.eps)
                                                .weight_decay(kOptions.weight_decay));
  for (int step = 0; step < 4; ++step) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      parameters[i].mutable_grad() = gradient(i, step);
    }
    reference.step();
  }
  return parameters;
}

void run(const std::vector<nn::SlotPtr>& slots) {
  AdamW optimizer(slots, kOptions);
  for (int step = 0; step < 4; ++step) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      set_grad(slots[i], gradient(i, step));
    }
    optimizer.step();
  }
}

void expect_as_reference(const std::vector<nn::SlotPtr>& slots) {
  const std::vector<at::Tensor> parameters = expected();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_CLOSE(slots[i]->get(), parameters[i].detach(), 1e-6, 1e-7) << i;
  }
}

TEST(AdamW, AgreesWithLibtorch) {
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    slots.push_back(slot_of(initial(i)));
  }
  run(slots);
  expect_as_reference(slots);
}

// Shards of 7 and 3 rows over 4 ranks, of 1 row (three empty shards), a replicated one.
TEST_ON_MESH(AdamW, AgreesOnShardsOfOneMeshDimension, {4}, {"dp"}) {
  std::vector<nn::SlotPtr> slots{
      slot_of(initial(0), mesh, {Shard{0}}), slot_of(initial(1), mesh, {Shard{0}}),
      slot_of(initial(2), mesh, {Shard{0}}), slot_of(initial(3), mesh, {Replicate{}})};
  run(slots);
  expect_as_reference(slots);
}

TEST_ON_MESH(AdamW, AgreesOnShardsOfTwoMeshDimensions, {2, 2}, {"dp", "tp"}) {
  std::vector<nn::SlotPtr> slots{slot_of(initial(0), mesh, {Shard{0}, Shard{0}}),
                                 slot_of(initial(1), mesh, {Shard{0}, Replicate{}}),
                                 slot_of(initial(2), mesh, {Shard{0}, Shard{1}}),
                                 slot_of(initial(3), mesh["tp"], {Shard{1}})};
  run(slots);
  expect_as_reference(slots);
}

TEST_ON_MESH(AdamW, ReducesAPendingGradient, {2}, {"tp"}) {
  const nn::SlotPtr slot = slot_of(at::ones({3}), mesh, {Replicate{}});
  const nn::SlotPtr reference = slot_of(at::ones({3}));
  const at::Tensor term = at::arange(3, at::kFloat) * (rank.rank() + 1);
  slot->get().mutable_grad() =
      DistributedTensor::from_local(term, mesh, {Partial{}}).tensor().detach();
  set_grad(reference, at::arange(3, at::kFloat) * 3);
  AdamW({slot}, kOptions).step();
  AdamW({reference}, kOptions).step();
  EXPECT_CLOSE(local_tensor(slot->get()), reference->get());
}

TEST(AdamW, SkipsParametersWithoutGradient) {
  const nn::SlotPtr with = slot_of(at::ones({2}));
  const nn::SlotPtr without = slot_of(at::ones({2}));
  AdamW optimizer({with, without}, kOptions);
  set_grad(with, at::ones({2}));
  optimizer.step();
  EXPECT_FALSE(with->get().detach().equal(at::ones({2})));
  EXPECT_EQUAL(without->get().detach(), at::ones({2}));
}

TEST(AdamW, UpdatesATiedParameterOnce) {
  const nn::SlotPtr slot = slot_of(at::ones({2}));
  const nn::SlotPtr reference = slot_of(at::ones({2}));
  set_grad(slot, at::ones({2}));
  set_grad(reference, at::ones({2}));
  AdamW({slot, slot}, kOptions).step();
  AdamW({reference}, kOptions).step();
  EXPECT_EQUAL(slot->get().detach(), reference->get().detach());
}

TEST_ON_MESH(AdamW, FollowsASlotThatIsShardedLater, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(initial(0));
  AdamW optimizer({slot}, kOptions);
  slot->set(slot_of(initial(0), mesh, {Shard{0}})->get());
  set_grad(slot, gradient(0, 0));
  optimizer.step();
  const nn::SlotPtr reference = slot_of(initial(0));
  set_grad(reference, gradient(0, 0));
  AdamW({reference}, kOptions).step();
  EXPECT_CLOSE(slot->get(), reference->get().detach());
}

TEST(AdamW, RefusesStateOfAnotherType) {
  for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
    const nn::SlotPtr slot = slot_of(at::ones({4}));
    AdamW optimizer({slot}, {.moment_dtype = moments});
    set_grad(slot, at::ones({4}));
    optimizer.step();
    slot->set(at::ones({4}, at::kDouble).requires_grad_());
    set_grad(slot, at::ones({4}, at::kDouble));
    EXPECT_ERROR(optimizer.step(), "would be made as Double now", "before the first step");
    slot->set(at::ones({4}).requires_grad_());
    set_grad(slot, at::ones({4}));
    optimizer.options().moment_dtype = moments == at::kFloat ? at::kBFloat16 : at::kFloat;
    EXPECT_ERROR(optimizer.step(), "the optimizer's state of a parameter of sizes [4]");
  }
}

TEST(AdamW, HasLibtorchsDefaults) {
  const torch::optim::AdamWOptions theirs;
  const AdamWOptions ours;
  EXPECT_EQ(ours.lr, theirs.lr());
  EXPECT_EQ(std::make_tuple(ours.beta1, ours.beta2), theirs.betas());
  EXPECT_EQ(ours.eps, theirs.eps());
  EXPECT_EQ(ours.weight_decay, theirs.weight_decay());
}

TEST(AdamW, Refusals) {
  const nn::SlotPtr slot = slot_of(at::ones({4}));
  AdamW optimizer({slot}, kOptions);
  set_grad(slot, at::ones({4}));
  optimizer.step();
  slot->set(at::ones({2}).requires_grad_());
  set_grad(slot, at::ones({2}));
  EXPECT_ERROR(optimizer.step(), "has sizes [2] on cpu but had [4]");
  {
    nn::Linear module(2, 2);
    AdamW optimizer(module, kOptions);
    set_grad(module.slot("weight"), at::ones({2, 2}));
    EXPECT_ERROR(optimizer.step(), "that was never filled");
  }
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.beta1 = 1.0}),
               "betas 1 and");
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.lr = -1.0}), "lr -1");
}

TEST(AdamW, UpdatesParametersOfSeveralTypes) {
  const nn::SlotPtr wide = slot_of(at::ones({2}, at::kDouble));
  const nn::SlotPtr narrow = slot_of(at::ones({2}, at::kBFloat16));
  set_grad(wide, at::ones({2}, at::kDouble));
  set_grad(narrow, at::ones({2}, at::kBFloat16));
  AdamW({wide, narrow}, kOptions).step();
  EXPECT_NEAR(wide->get()[0].item<double>(), 1.0 - 1e-2 - 1e-3, 1e-7);
  EXPECT_NEAR(narrow->get()[0].item<double>(), 0.989, 4e-3);
}

}  // namespace
}  // namespace tessera::optim

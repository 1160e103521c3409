// AdamW with moments in bf16.

#include "optim/parameters.h"
#include "tessera/nn/linear.h"
#include "tessera/optim/adamw.h"

namespace tessera::optim {
namespace {

const AdamWOptions kOptions{.lr = 1e-2,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .weight_decay = 0.1,
                            .moment_dtype = at::kBFloat16,
                            .seed = 3};

std::vector<nn::SlotPtr> plain_slots() {
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    slots.push_back(slot_of(values_of(i, 100)));
  }
  return slots;
}

void run(AdamW& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    for (std::size_t i = 0; i < optimizer.parameters().size(); ++i) {
      set_grad(optimizer.parameters()[i], values_of(i, 1000 * (step + 1)));
    }
    optimizer.step();
  }
}

/// Parameters and state after four steps, whole.
std::vector<at::Tensor> results(const std::vector<nn::SlotPtr>& slots) {
  AdamW optimizer(slots, kOptions);
  run(optimizer, 0, 4);
  std::vector<at::Tensor> all;
  for (const nn::SlotPtr& slot : slots) {
    all.push_back(full_tensor(slot->get()));
  }
  for (const StateTensor& state : optimizer.state()) {
    all.push_back(full_tensor(state.tensor));
  }
  return all;
}

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQUAL(found[i], expected[i]) << i;
  }
}

TEST(NarrowMoments, AreBf16AndCountersAreNot) {
  AdamW optimizer(plain_slots(), kOptions);
  run(optimizer, 0, 1);
  for (const StateTensor& state : optimizer.state()) {
    EXPECT_EQ(state.tensor.scalar_type(), state.name == "step" ? at::kFloat : at::kBFloat16);
  }
}

// Shards of 7 and 3 rows over 2 and 4 ranks, of 1 row (empty shards), a replicated one.
TEST(NarrowMoments, HaveTheSameBitsOnOneMeshDimension) {
  const std::vector<at::Tensor> expected = results(plain_slots());
  for (const int ranks : {2, 4}) {
    RunOnMesh({ranks}, {"dp"}, [&](const DeviceMesh& mesh) {
      expect_equal(results({slot_of(values_of(0, 100), mesh, {Shard{0}}),
                            slot_of(values_of(1, 100), mesh, {Shard{0}}),
                            slot_of(values_of(2, 100), mesh, {Shard{1}}),
                            slot_of(values_of(3, 100), mesh, {Replicate{}})}),
                   expected);
    });
  }
}

TEST_ON_MESH(NarrowMoments, HaveTheSameBitsOnTwoMeshDimensions, {2, 2}, {"dp", "tp"}) {
  const std::vector<at::Tensor> expected = results(plain_slots());
  expect_equal(results({slot_of(values_of(0, 100), mesh, {Shard{0}, Shard{1}}),
                        slot_of(values_of(1, 100), mesh, {Shard{0}, Replicate{}}),
                        slot_of(values_of(2, 100), mesh, {Shard{0}, Shard{1}}),
                        slot_of(values_of(3, 100), mesh["tp"], {Shard{1}})}),
               expected);
}

/// Three dimensions, the last two of which are split: rows that are neither consecutive nor equally
/// far apart.
TEST_ON_MESH(NarrowMoments, HaveTheSameBitsInAnyDimensions, {2, 2}, {"a", "b"}) {
  const at::Tensor values = normal_values({3, 5, 7}, 1);
  const at::Tensor grad = normal_values({3, 5, 7}, 2);
  const auto after = [&](const nn::SlotPtr& slot) {
    AdamW optimizer({slot}, kOptions);
    set_grad(slot, grad);
    optimizer.step();
    return full_tensor(optimizer.state().front().tensor);
  };
  const at::Tensor expected = after(slot_of(values));
  EXPECT_EQUAL(after(slot_of(values, mesh, {Shard{1}, Shard{2}})), expected);
}

/// The mean over many elements with one gradient is that of fp32 moments. Rounded to the nearest,
/// squares with a decay of 0.999 would stay where they are.
TEST(NarrowMoments, AreRightInTheMean) {
  const auto mean_of = [](c10::ScalarType type, std::size_t which) {
    const nn::SlotPtr slot = slot_of(at::zeros({20000}));
    AdamW optimizer({slot}, {.lr = 1e-3, .moment_dtype = type});
    for (int step = 0; step < 50; ++step) {
      set_grad(slot, at::full({20000}, step < 10 ? 1.0 : 0.7));
      optimizer.step();
    }
    return optimizer.state()[which].tensor.to(at::kDouble).mean().item<double>();
  };
  for (const std::size_t which : {0, 1}) {
    const double wide = mean_of(at::kFloat, which);
    EXPECT_NEAR(mean_of(at::kBFloat16, which), wide, 5e-4 * wide) << which;
  }
}

/// A regression: the loss falls as with fp32 moments.
TEST(NarrowMoments, TrainAsWideOnes) {
  const at::Tensor x = normal_values({256, 16}, 1);
  const at::Tensor y = x.matmul(normal_values({16, 4}, 2));
  const auto losses = [&](c10::ScalarType type) {
    const nn::SlotPtr slot = slot_of(normal_values({16, 4}, 3));
    AdamW optimizer({slot}, {.lr = 3e-2, .beta2 = 0.95, .moment_dtype = type});
    std::vector<double> all;
    for (int step = 0; step < 150; ++step) {
      const at::Tensor loss = (x.matmul(slot->get()) - y).square().mean();
      all.push_back(loss.item<double>());
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
    return all;
  };
  const std::vector<double> wide = losses(at::kFloat);
  const std::vector<double> narrow = losses(at::kBFloat16);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    EXPECT_NEAR(narrow[i], wide[i], 0.02 * wide[i] + 1e-3) << i;
  }
  EXPECT_LT(narrow.back(), 0.02 * narrow.front());
}

TEST(NarrowMoments, ContinueBitForBit) {
  const std::vector<nn::SlotPtr> slots = plain_slots();
  AdamW optimizer(slots, kOptions);
  run(optimizer, 0, 2);

  std::vector<nn::SlotPtr> copies;
  for (const nn::SlotPtr& slot : slots) {
    copies.push_back(slot_of(slot->get().detach()));
  }
  AdamW resumed(copies, kOptions);
  const std::vector<StateTensor> from = optimizer.state();
  const std::vector<StateTensor> to = resumed.state();
  for (std::size_t i = 0; i < from.size(); ++i) {
    at::Tensor(to[i].tensor).copy_(from[i].tensor);
  }
  run(optimizer, 2, 4);
  run(resumed, 2, 4);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQUAL(slots[i]->get().detach(), copies[i]->get().detach()) << i;
  }
}

TEST(NarrowMoments, OfNarrowAndWideAndComplexParameters) {
  const nn::SlotPtr narrow = slot_of(at::ones({9}, at::kBFloat16));
  const nn::SlotPtr single = slot_of(at::ones({9}));
  const nn::SlotPtr wide = slot_of(at::ones({9}, at::kDouble));
  const nn::SlotPtr complex = slot_of(at::ones({9}, at::kComplexFloat));
  AdamW optimizer({narrow, single, wide, complex}, kOptions);
  for (const nn::SlotPtr& slot : optimizer.parameters()) {
    set_grad(slot, at::ones({9}, slot->get().options()));
  }
  optimizer.step();
  const std::vector<StateTensor> state = optimizer.state();
  EXPECT_EQ(state[0].tensor.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state[3].tensor.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state[6].tensor.scalar_type(), at::kDouble);
  EXPECT_EQ(state[9].tensor.scalar_type(), at::kComplexFloat);
  EXPECT_NEAR(narrow->get()[0].item<double>(), 0.989, 4e-3);
  EXPECT_NEAR(single->get()[0].item<double>(), 0.989, 1e-6);
  EXPECT_NEAR(at::real(complex->get()[0]).item<double>(), 0.989, 1e-6);
}

/// Neighbours in a module have other numbers, and a parameter the same in another order of them.
TEST(NarrowMoments, AreRoundedByTheNameOfTheParameter) {
  nn::Linear module(64, 64);
  module.named_slots();  // names them
  const auto squares_of = [&](std::vector<nn::SlotPtr> slots, std::size_t which) {
    AdamW optimizer(std::move(slots), kOptions);
    for (const nn::SlotPtr& slot : optimizer.parameters()) {
      slot->set(at::ones(slot->get().sizes()).requires_grad_());
      set_grad(slot, at::full(slot->get().sizes(), 1.1));
    }
    optimizer.step();
    return optimizer.state()[3 * which + 1].tensor.clone();
  };
  const nn::SlotPtr weight = module.slot("weight");
  const nn::SlotPtr bias = module.slot("bias");
  const at::Tensor first = squares_of({weight, bias}, 0);
  EXPECT_EQUAL(first, squares_of({bias, weight}, 1));
  EXPECT_FALSE(first[0].equal(squares_of({weight, bias}, 1)));
}

TEST(NarrowMoments, OtherTypesAreRefused) {
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{slot_of(at::ones({2}))}, {.moment_dtype = at::kHalf}),
               "moments in Half");
}

}  // namespace
}  // namespace tessera::optim

#include <algorithm>
#include <cmath>

#include "optim/parameters.h"
#include "tessera/comm/trace.h"
#include "tessera/optim/muon.h"

namespace tessera::optim {
namespace {

/// Takes three steps with gradients that are equal on all ranks.
void run(Muon& optimizer) {
  for (int step = 0; step < 3; ++step) {
    int i = 0;
    for (const nn::SlotPtr& slot : optimizer.parameters()) {
      set_grad(slot, normal_values(slot->persistent().sizes(), 100 * (step + 1) + i++));
    }
    optimizer.step();
  }
}

using Place = std::function<nn::SlotPtr(const at::Tensor& tensor, std::size_t i)>;
const std::vector<std::vector<std::int64_t>> kMatrixSizes{{7, 5}, {8, 2}, {1, 6},
                                                          {5, 9}, {4, 4}, {3, 7}};

void expect_as_one_process(const Place& place, const MuonOptions& options) {
  std::vector<nn::SlotPtr> slots, reference;
  for (std::size_t i = 0; i < kMatrixSizes.size(); ++i) {
    const at::Tensor values = normal_values(kMatrixSizes[i], static_cast<std::int64_t>(i));
    slots.push_back(place(values, i));
    reference.push_back(slot_of(values));
  }
  Muon optimizer(slots, options);
  Muon expected(reference, options);
  run(optimizer);
  run(expected);
  const double tolerance = options.compute_dtype == at::kFloat ? 1e-5 : 0.02 * options.lr;
  EXPECT_EACH(tensors_of(slots), tensors_of(reference), 0.0, tolerance);
}

constexpr MuonOptions kExact{.lr = 0.05, .compute_dtype = c10::ScalarType::Float};

// Matrices are sharded by rows (some shards are empty) or columns, replicated, or plain.
TEST_ON_MESH(Muon, AgreesOnOneMeshDimension, {4}, {"dp"}) {
  expect_as_one_process(
      [&](const at::Tensor& tensor, std::size_t i) {
        if (i == 3) {
          return slot_of(tensor, mesh, {Shard{1}});
        }
        if (i == 4) {
          return slot_of(tensor, mesh, {Replicate{}});
        }
        return i == 5 ? slot_of(tensor) : slot_of(tensor, mesh, {Shard{0}});
      },
      kExact);
}

TEST_ON_MESH(Muon, AgreesOnTwoMeshDimensionsAndASubmesh, {2, 2}, {"dp", "tp"}) {
  const std::vector<Placements> placements{{Shard{0}, Shard{0}},
                                           {Shard{0}, Shard{1}},
                                           {Shard{1}, Shard{0}},
                                           {Shard{0}, Replicate{}},
                                           {Replicate{}, Shard{1}}};
  expect_as_one_process(
      [&](const at::Tensor& tensor, std::size_t i) {
        return i == 5 ? slot_of(tensor, mesh["tp"], {Shard{0}})
                      : slot_of(tensor, mesh, placements[i]);
      },
      kExact);
}

TEST_ON_MESH(Muon, AgreesInBf16, {3}, {"dp"}) {
  expect_as_one_process(
      [&](const at::Tensor& tensor, std::size_t) { return slot_of(tensor, mesh, {Shard{0}}); },
      {.lr = 0.05, .rate = MuonRate::kMatchRmsAdamW});
}

// In a fused weight of two blocks, rank 0 has rows 0, 1, 4, 5, and rank 1 has rows 2, 3, 6, 7.
TEST_ON_MESH(Muon, AgreesOnShardsOfSeveralBlocks, {2}, {"tp"}) {
  const LayoutPtr layout = Layout::intern({2}, {{{2, {}}, {4, {0}}}, {}});
  const at::Tensor values = normal_values({8, 3}, 0);
  const at::Tensor spread =
      distribute_tensor(values.clone(), mesh, {Replicate{}}).redistribute(layout).tensor();
  const auto slot =
      std::make_shared<nn::ParameterSlot>(spread.detach().requires_grad_(), /*initialized=*/true);
  const nn::SlotPtr reference = slot_of(values);
  const at::Tensor gradient = normal_values({8, 3}, 1);
  slot->get().mutable_grad() =
      distribute_tensor(gradient, mesh, {Replicate{}}).redistribute(layout).tensor().detach();
  set_grad(reference, gradient);
  Muon({slot}, kExact).step();
  Muon({reference}, kExact).step();
  EXPECT_CLOSE(slot->get(), reference->get().detach(), 0.0, 1e-5);
}

// Rank 1 has no gradient, as if the module had not run on rank 1.
TEST_ON_MESH(Muon, TreatsAMissingGradientOfAShardedMatrixLikeZeros, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(normal_values({4, 3}, 0), mesh, {Shard{0}});
  const nn::SlotPtr frozen = slot_of(normal_values({4, 3}, 0), mesh, {Shard{0}});
  const nn::SlotPtr reference = slot_of(normal_values({4, 3}, 0));
  frozen->persistent().requires_grad_(false);
  at::Tensor gradient = normal_values({4, 3}, 1);
  gradient.narrow(0, 2, 2).zero_();
  if (rank.rank() == 0) {
    set_grad(slot, gradient);
  }
  set_grad(reference, gradient);
  Muon({slot, frozen}, kExact).step();
  Muon({reference}, kExact).step();
  EXPECT_CLOSE(slot->get(), reference->get().detach(), 0.0, 1e-5);
  EXPECT_EQUAL(frozen->get(), normal_values({4, 3}, 0));
}

// A gradient of zeros still causes momentum and weight decay; a missing gradient causes no update.
TEST_ON_MESH(Muon, SkipsAShardedMatrixWithoutGradientOnAllRanks, {3}, {"dp"}) {
  std::vector<nn::SlotPtr> slots, reference;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(slot_of(normal_values({5, 4}, i), mesh, {Shard{0}}));
    reference.push_back(slot_of(normal_values({5, 4}, i)));
  }
  Muon optimizer(slots, kExact), expected(reference, kExact);
  for (const auto& used : std::vector<std::vector<std::size_t>>{{0, 1}, {1}, {}, {1, 0}}) {
    optimizer.zero_grad();
    expected.zero_grad();
    for (const std::size_t i : used) {
      set_grad(slots[i], normal_values({5, 4}, 10 + static_cast<std::int64_t>(i)));
      set_grad(reference[i], normal_values({5, 4}, 10 + static_cast<std::int64_t>(i)));
    }
    optimizer.step();
    expected.step();
  }
  EXPECT_EACH(tensors_of(slots), tensors_of(reference), 0.0, 1e-5);
  EXPECT_EQUAL(slots[2]->get(), normal_values({5, 4}, 2));
}

TEST(Muon, SkipsAPlainMatrixWithoutGradient) {
  const nn::SlotPtr slot = slot_of(at::ones({2, 2}));
  Muon({slot}, kExact).step();
  EXPECT_EQUAL(slot->get().detach(), at::ones({2, 2}));
}

TEST(Muon, UpdatesNarrowMatricesInFp32) {
  const nn::SlotPtr narrow = slot_of(normal_values({4, 3}, 0).to(at::kHalf));
  const nn::SlotPtr wide = slot_of(normal_values({4, 3}, 0).to(at::kHalf).to(at::kFloat));
  Muon optimizer({narrow}, kExact);
  Muon expected({wide}, kExact);
  const at::Tensor gradient = normal_values({4, 3}, 1).to(at::kHalf);
  set_grad(narrow, gradient * 0.125);
  set_grad(wide, gradient.to(at::kFloat));
  optimizer.step(/*gradient_factor=*/8.0);
  expected.step();
  EXPECT_CLOSE(narrow->get().detach().to(at::kFloat),
               wide->get().detach().to(at::kHalf).to(at::kFloat), 0.0, 2e-3);
  EXPECT_EQ(optimizer.state()[0].tensor.scalar_type(), at::kFloat);
}

// Rank 1's parameter is marked as uninitialized. All ranks must throw an error; none may hang.
TEST(Muon, FailsOnAllRanksIfOneRankFails) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    const nn::SlotPtr slot = slot_of(normal_values({6, 3}, 0), rank.mesh({3}, {"dp"}), {Shard{0}});
    set_grad(slot, normal_values({6, 3}, 1));
    Muon optimizer({slot}, kExact);
    optimizer.step();
    slot->set_initialized(rank.rank() != 1);
    optimizer.step();
  });
  EXPECT_CONTAINS(errors[1], "which was never filled");
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

TEST(Muon, RefusesInvalidCalls) {
  EXPECT_ERROR(Muon({slot_of(at::ones({3}))}, MuonOptions{}), "a parameter of sizes [3]");
  EXPECT_ERROR(Muon({slot_of(at::ones({3, 2, 2}))}, MuonOptions{}),
               "a parameter of sizes [3, 2, 2]");
  const std::vector<nn::SlotPtr> slots{slot_of(at::ones({2, 2}))};
  EXPECT_ERROR(Muon(slots, {.lr = -1.0}), "Muon with lr -1");
  EXPECT_ERROR(Muon(slots, {.momentum = 1.0}), "momentum 1,");
  EXPECT_ERROR(Muon(slots, {.ns_steps = 100}), "100 Newton-Schulz steps");
}

at::Tensor wave(at::IntArrayRef sizes, double first, double frequency) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat)
      .add(first)
      .mul(frequency)
      .view(sizes);
}

// The expected updates come from torch.optim.Muon (torch 2.11), which iterates in bf16, so updates
// on different processors differ by up to 1 %.
TEST(Muon, AgreesWithPyTorch) {
  struct Case {
    std::vector<std::int64_t> sizes;
    MuonRate rate;
    std::vector<float> expected;
  };
  const std::vector<Case> cases{
      {{3, 5},
       MuonRate::kOriginal,
       {-0.11285F, 0.47732F, 1.01572F, 0.95869F, 0.38124F, -0.41667F, -0.81561F, -0.92222F,
        -0.53777F, -0.1066F, 0.60701F, 1.07574F, 0.93754F, 0.19476F, -0.45672F}},
      {{3, 5},
       MuonRate::kMatchRmsAdamW,
       {-0.05047F, 0.54864F, 0.96695F, 0.87785F, 0.34478F, -0.36885F, -0.81821F, -0.92358F,
        -0.56893F, -0.03892F, 0.61328F, 0.99521F, 0.86391F, 0.25312F, -0.39492F}},
      {{6, 2},
       MuonRate::kOriginal,
       {-0.27649F, 0.56501F, 1.19164F, 0.98939F, 0.14081F, -0.5913F, -0.78487F, -0.65393F,
        -0.48036F, -0.18824F, 0.38816F, 1.00761F}},
      {{6, 2},
       MuonRate::kMatchRmsAdamW,
       {-0.0782F, 0.59464F, 1.00221F, 0.86249F, 0.26594F, -0.40402F, -0.81029F, -0.8481F, -0.56196F,
        -0.04189F, 0.55324F, 0.95199F}}};
  for (const Case& c : cases) {
    const nn::SlotPtr slot = slot_of(wave(c.sizes, 0, 0.7).sin());
    Muon optimizer(
        {slot},
        {.lr = 0.1, .weight_decay = 0.2, .momentum = 0.9, .nesterov = true, .rate = c.rate});
    for (int step = 0; step < 3; ++step) {
      set_grad(slot, wave(c.sizes, 5 * step, 1.3).cos());
      optimizer.step();
    }
    const at::Tensor expected = at::tensor(c.expected).view(c.sizes);
    EXPECT_CLOSE(slot->get().detach(), expected, 0.0, 0.01)
        << (slot->get().detach() - expected).abs().max();
  }
}

// According to Muon's authors, all singular values of an update are about 0.7 to 1.2.
TEST(Muon, MakesTheUpdateNearlyOrthogonal) {
  for (const auto& sizes : {std::vector<std::int64_t>{6, 9}, {9, 6}, {5, 5}}) {
    const nn::SlotPtr slot = slot_of(at::zeros(sizes));
    Muon optimizer({slot}, {.lr = 1.0,
                            .weight_decay = 0.0,
                            .rate = MuonRate::kMatchRmsAdamW,
                            .compute_dtype = at::kFloat});
    set_grad(slot, normal_values(sizes, 3));
    optimizer.step();
    const double rate = 0.2 * std::sqrt(static_cast<double>(std::max(sizes[0], sizes[1])));
    const at::Tensor values =
        std::get<1>(at::linalg_svd(slot->get().detach() / rate, /*full_matrices=*/false));
    EXPECT_GT(values.min().item<double>(), 0.3);
    EXPECT_LT(values.max().item<double>(), 1.3);
  }
}

// Each of the 4 ranks updates one 8 x 8 matrix. One all-to-all sends shards of 16 elements to the
// updating rank, and one all-to-all sends the updates back.
TEST_ON_MESH(Muon, ExchangesShardsInTwoAllToAlls, {4}, {"dp"}) {
  std::vector<nn::SlotPtr> slots;
  for (int i = 0; i < 4; ++i) {
    slots.push_back(slot_of(normal_values({8, 8}, i), mesh, {Shard{0}}));
    set_grad(slots.back(), normal_values({8, 8}, 10 + i));
  }
  Muon optimizer(slots, {.lr = 0.05});
  const Sent sent(rank);
  optimizer.step();
  EXPECT_EQ(sent.calls("dp", "all_to_all"), 2);
  EXPECT_EQ(sent.of("dp", "all_to_all").bytes, 2 * 4 * 16 * 2);
}

}  // namespace
}  // namespace tessera::optim

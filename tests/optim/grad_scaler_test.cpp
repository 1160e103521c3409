#include "tessera/optim/grad_scaler.h"

#include <cmath>

#include "optim/parameters.h"
#include "tessera/optim/adamw.h"
#include "testing/values.h"

namespace tessera::optim {
namespace {

using testing::kInfinity;

constexpr AdamWOptions kAdamW{.lr = 1e-2};

bool step(GradScaler& scaler, bool overflow) {
  const nn::SlotPtr slot = slot_of(at::ones({2}));
  set_grad(slot, at::full({2}, overflow ? kInfinity : 1.0));
  AdamW optimizer({slot}, kAdamW);
  return scaler.step(optimizer);
}

/// clip_grad_norm_() unscales only the gradient of `a`, so a step() that updates `b` must throw.
TEST(GradScaler, RefusesAStepOnPartlyUnscaledGradients) {
  const nn::SlotPtr a = slot_of(at::ones({2})), b = slot_of(at::ones({2}));
  set_grad(a, at::ones({2}));
  AdamW optimizer({a, b}, kAdamW);
  GradScaler scaler;
  scaler.clip_grad_norm_({a}, 1.0);
  EXPECT_TRUE(scaler.step(optimizer));
  set_grad(b, at::full({2}, kInfinity));
  const at::Tensor before = a->get().detach().clone();
  scaler.clip_grad_norm_({a}, 1.0);
  EXPECT_ERROR(scaler.step(optimizer), "a parameter of sizes [2]", "unscale_(all)");
  scaler.unscale_({a});
  EXPECT_ERROR(scaler.step(optimizer), "did not clip or unscale that parameter");
  for (const bool enabled : {true, false}) {
    GradScaler other({.enabled = enabled});
    EXPECT_ERROR(other.clip_and_step(optimizer, {a}, 1.0),
                 "did not clip or unscale that parameter");
  }
  EXPECT_EQUAL(a->get().detach(), before);
}

TEST(GradScaler, UnscalesOncePerStepAndRefusesNarrowGradients) {
  const nn::SlotPtr slot = slot_of(at::zeros({2}));
  set_grad(slot, at::tensor({3.0F, 4.0F}).mul(256.0));
  GradScaler scaler({.init_scale = 256.0});
  scaler.unscale_({slot});
  EXPECT_EQUAL(slot->get().grad(), at::tensor({3.0F, 4.0F}));
  EXPECT_ERROR(scaler.clip_grad_norm_({slot}, 1.0), "unscale_ was already called");
  EXPECT_ERROR(scaler.unscale_({slot}), "unscale_ was already called");
  AdamW optimizer({slot}, kAdamW);
  EXPECT_TRUE(scaler.step(optimizer));
  const nn::SlotPtr half = slot_of(at::zeros({2}, at::kHalf));
  set_grad(half, at::ones({2}, at::kHalf));
  EXPECT_ERROR(GradScaler().unscale_({half}), "unscale_ of Half gradients");
}

// In fp16, the unscaled gradient (2^-26) would become 0.
TEST(GradScaler, SupportsGradientsBelowTheFp16Range) {
  const nn::SlotPtr slot = slot_of(at::ones({2}, at::kHalf));
  set_grad(slot, at::full({2}, std::ldexp(1.0, -10), at::kHalf));
  GradScaler scaler({.init_scale = 65536.0});
  AdamW optimizer({slot}, {.lr = 0.125, .eps = 0.0, .weight_decay = 0.0});
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQUAL(slot->get().detach(), at::full({2}, 0.875, at::kHalf));
}

TEST(GradScaler, SkipsAnOverflowedStep) {
  for (const double bad : {kInfinity, -kInfinity, std::nan("")}) {
    const nn::SlotPtr slot = slot_of(at::ones({2}));
    AdamW optimizer({slot}, kAdamW);
    GradScaler scaler({.init_scale = 16.0});
    set_grad(slot, at::tensor({1.0, bad}).to(at::kFloat));
    EXPECT_FALSE(std::isfinite(scaler.clip_grad_norm_({slot}, 1.0).item<double>()));
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_EQUAL(slot->get().detach(), at::ones({2}));
    EXPECT_EQ(scaler.scale(), 8.0);
  }
}

TEST(GradScaler, GrowsAfterFiniteStepsAndStopsAtTheMinimum) {
  GradScaler scaler({.init_scale = 16.0, .growth_interval = 3});
  std::vector<double> found;
  for (const bool overflow : {false, false, true, false, false, false, false}) {
    step(scaler, overflow);
    found.push_back(scaler.scale());
  }
  // As in PyTorch, the scale is doubled after 3 finite steps in a row, and halved by an overflow.
  EXPECT_EQ(found, (std::vector<double>{16, 16, 8, 8, 8, 16, 16}));
  GradScaler small({.init_scale = 3e-4});
  EXPECT_FALSE(step(small, true));
  EXPECT_ERROR(step(small, true), "below the minimum, 0.0001");
  EXPECT_EQ(small.scale(), 1.5e-4);
}

TEST(GradScaler, DoesNothingWhenDisabled) {
  GradScaler scaler({.enabled = false});
  const at::Tensor loss = at::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_TRUE(step(scaler, true));
  EXPECT_EQ(scaler.scale(), 1.0);
}

TEST(GradScaler, ContinuesFromItsState) {
  const GradScalerOptions options{.init_scale = 16.0, .growth_interval = 3};
  GradScaler one(options);
  for (const bool overflow : {false, true, false}) {
    step(one, overflow);
  }
  GradScaler other(options);
  other.load_state(one.state());
  for (const bool overflow : {false, false, true, true, false}) {
    step(one, overflow);
    step(other, overflow);
    EXPECT_EQ(one.state(), other.state());
  }
  EXPECT_ERROR(other.load_state({}), "the scale is 0");
}

TEST(GradScaler, RefusesInvalidOptions) {
  EXPECT_ERROR(GradScaler({.init_scale = 0.0}), "initial scale 0");
  EXPECT_ERROR(GradScaler({.backoff_factor = 1.0}), "backoff 1 is");
  EXPECT_ERROR(GradScaler({.growth_interval = 0}), "every 0 steps");
}

std::vector<nn::SlotPtr> spread_slots(const DeviceMesh& mesh) {
  return {slot_of(normal_values({7, 5}, 0), mesh, {Shard{0}, Shard{0}}),
          slot_of(normal_values({3}, 1), mesh, {Shard{0}, Replicate{}}),
          slot_of(normal_values({1, 4}, 2), mesh, {Replicate{}, Shard{0}}),
          slot_of(normal_values({8, 2}, 3), mesh["tp"], {Shard{1}})};
}

void set_grads(const std::vector<nn::SlotPtr>& slots, double scale) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    set_grad(slots[i],
             normal_values(slots[i]->persistent().sizes(), 10 + static_cast<int>(i)) * scale);
  }
}

// One gradient is infinite on one rank. All ranks must skip the step, even if the infinite gradient
// is a replica that gradient norms do not count.
TEST_ON_MESH(GradScaler, SkipsAStepOnAllRanks, {2, 2}, {"dp", "tp"}) {
  for (const auto& [bad, where] : {std::pair(0U, 0), {1U, 0}, {2U, 0}, {3U, 0}, {2U, 2}, {3U, 2}}) {
    const std::vector<nn::SlotPtr> slots = spread_slots(mesh);
    AdamW optimizer(slots, kAdamW);
    GradScaler scaler({.init_scale = 16.0});
    set_grads(slots, 1.0);
    const at::Tensor local = local_tensor(slots[bad]->persistent().grad());
    if (rank.rank() == where) {
      local.view(-1).slice(0, 0, 1).fill_(kInfinity);
    }
    EXPECT_FALSE(scaler.step(optimizer)) << bad;
    EXPECT_EQ(scaler.scale(), 8.0);
    EXPECT_EQUAL(slots[0]->persistent(), normal_values({7, 5}, 0));
  }
}

// Two pipeline stages: ranks 0 and 1, and ranks 2 and 3. A stage knows only its own mesh.
TEST(GradScaler, SkipsAStepOnAllPipelineStages) {
  RunOnMesh({2, 2}, {"pp", "dp"}, [](Rank& rank, const DeviceMesh& all) {
    const std::vector<int> stage = rank.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3};
    const DeviceMesh mesh(rank.world(), stage, MeshShape({2}, {"stage"}));
    for (const nn::SlotPtr& slot :
         {slot_of(at::ones({3}), mesh, {Shard{0}}), slot_of(at::ones({3}))}) {
      AdamW optimizer({slot}, kAdamW);
      GradScaler scaler({.init_scale = 16.0});
      set_grad(slot, at::ones({3}));
      if (rank.rank() == 3) {
        local_tensor(slot->persistent().grad()).fill_(kInfinity);
      }
      EXPECT_FALSE(scaler.step(optimizer, {.over = all}));
      EXPECT_EQ(scaler.scale(), 8.0);
      EXPECT_EQUAL(slot->persistent(), at::ones({3}));
    }
  });
}

TEST_ON_MESH(GradScaler, MatchesUnscaledTrainingWithOneAllReduce, {2, 2}, {"dp", "tp"}) {
  const std::vector<nn::SlotPtr> slots = spread_slots(mesh);
  const std::vector<nn::SlotPtr> reference = spread_slots(mesh);
  AdamW optimizer(slots, kAdamW);
  AdamW expected(reference, kAdamW);
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(at::full({}, 3.0)).item<float>(), 3.0F * 65536.0F);
  set_grads(slots, 65536.0);
  set_grads(reference, 1.0);
  const Sent sent(rank);
  const at::Tensor norm = scaler.clip_grad_norm_(slots, 0.5);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(sent.calls(), 1);
  EXPECT_NEAR(norm.item<double>(), clip_grad_norm_(reference, 0.5).item<double>(), 1e-5);
  expected.step();
  EXPECT_EACH(tensors_of(slots), tensors_of(reference), 1e-5);
}

}  // namespace
}  // namespace tessera::optim

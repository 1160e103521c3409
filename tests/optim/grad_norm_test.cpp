// Tests gradient norms of parameters on several meshes, clipping, and optimizer steps that multiply
// gradients by the clipping factor on the device.

#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "optim/parameters.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "testing/module_values.h"
#include "testing/values.h"

namespace tessera::optim {
namespace {

using testing::kInfinity;

/// Clips equal gradients by libtorch and by Tessera. Compares the norms and the clipped gradients.
void expect_as_libtorch(const std::vector<nn::SlotPtr>& slots, double p, double max_norm = 0.5) {
  std::vector<at::Tensor> reference;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor grad =
        normal_values(slots[i]->persistent().sizes(), static_cast<std::int64_t>(i) + 1);
    set_grad(slots[i], grad);
    reference.push_back(at::zeros_like(grad).requires_grad_());
    reference.back().mutable_grad() = grad.clone();
  }
  const double expected = torch::nn::utils::clip_grad_norm_(reference, max_norm, p);
  const at::Tensor norm = clip_grad_norm_(slots, max_norm, {.norm_type = p});
  EXPECT_FALSE(tessera::is_distributed(norm));
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_EQ(norm.scalar_type(), at::kFloat);
  EXPECT_NEAR(norm.item<double>(), expected, 2e-6 * expected) << "p = " << p;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor grad = full_tensor(slots[i]->persistent().grad());
    EXPECT_CLOSE(grad, reference[i].grad(), 1e-5, 1e-7) << "p = " << p << ", " << i;
  }
}

void expect_all_norms(const std::vector<nn::SlotPtr>& slots) {
  for (const double p : {1.0, 2.0, kInfinity, 3.0, 0.5}) {
    expect_as_libtorch(slots, p);
  }
}

TEST(GradNorm, WorksForPlainGradients) {
  expect_all_norms({slot_of(at::zeros({7, 5})), slot_of(at::zeros({3}))});
  expect_as_libtorch({slot_of(at::zeros({7, 5}))}, 2, 1e6);
}

TEST(GradNorm, OfMillionsOfElementsIsAccurate) {
  const nn::SlotPtr slot = slot_of(at::zeros({3'000'001}));
  const at::Tensor grad = normal_values({3'000'001}, 1);
  set_grad(slot, grad);
  const double expected = grad.to(at::kDouble).norm().item<double>();
  EXPECT_NEAR(grad_norm({slot}).item<double>(), expected, 1e-6 * expected);
}

// The parameter with 1 row has empty shards on three of four ranks.
TEST_ON_MESH(GradNorm, SupportsEmptyShards, {4}, {"dp"}) {
  expect_all_norms({slot_of(at::zeros({7, 5}), mesh, {Shard{0}}),
                    slot_of(at::zeros({1, 4}), mesh, {Shard{0}}),
                    slot_of(at::zeros({8}), mesh, {Replicate{}})});
}

TEST_ON_MESH(GradNorm, SupportsSubmeshesAndPlainParameters, {3, 2}, {"dp", "tp"}) {
  expect_all_norms({slot_of(at::zeros({7, 5}), mesh, {Shard{0}, Shard{0}}),
                    slot_of(at::zeros({5}), mesh, {Shard{0}, Replicate{}}),
                    slot_of(at::zeros({3, 4}), mesh["tp"], {Shard{1}}),
                    slot_of(at::zeros({3}), mesh["dp"], {Replicate{}}),
                    slot_of(at::zeros({2, 2}))});
}

TEST(GradNorm, UsesOneAllReduceForSeveralMeshes) {
  RunOnMesh({4}, {"dp"}, [](Rank& rank, const DeviceMesh& all) {
    const DeviceMesh square = rank.mesh({2, 2}, {"a", "b"});
    const DeviceMesh pair(rank.world(),
                          rank.rank() < 2 ? std::vector<int>{0, 1} : std::vector{2, 3},
                          MeshShape({2}, {"pair"}));
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros({6}), square, {Shard{0}, Replicate{}}),
                                   slot_of(at::zeros({5, 2}), all, {Shard{0}})};
    expect_all_norms(slots);
    // Ranks 0 and 1 share a gradient of norm 3, ranks 2 and 3 a gradient of norm 4: in total norm
    // 5.
    const nn::SlotPtr own = slot_of(at::zeros({2}), pair, {Shard{0}});
    set_grad(own, at::tensor({rank.rank() < 2 ? 3.0F : 4.0F, 0.0F}));
    for (const nn::SlotPtr& slot : slots) {
      slot->persistent().mutable_grad().reset();
    }
    slots.push_back(own);
    const Sent sent(rank);
    EXPECT_FLOAT_EQ(grad_norm(slots).item<float>(), 5.0F);
    EXPECT_EQ(sent.calls(), 1);
  });
}

// A rank knows the mesh of its own pipeline stage, but not the mesh of the other stage.
TEST_ON_MESH(GradNorm, CanCoverAllPipelineStages, {4}, {"world"}) {
  const bool first = rank.rank() < 2;
  const DeviceMesh stage(rank.world(), first ? std::vector<int>{0, 1} : std::vector{2, 3},
                         MeshShape({2}, {"dp"}));
  const nn::SlotPtr slot = slot_of(at::zeros({3}), stage, {Shard{0}});
  set_grad(slot, at::tensor({first ? 3.0F : 4.0F, 0.0F, 0.0F}));
  EXPECT_FLOAT_EQ(grad_norm({slot}).item<float>(), first ? 3.0F : 4.0F);
  const NormOptions both{.over = mesh};
  EXPECT_FLOAT_EQ(grad_norm({slot}, both).item<float>(), 5.0F);
}

double norm_on(const Rank& rank, const DeviceMesh& mesh, const DeviceMesh& distinct = {}) {
  const nn::SlotPtr slot = slot_of(at::zeros({1}), mesh, {Replicate{}});
  slot->set_distinct_along(distinct);
  set_grad(slot, at::full({1}, std::ldexp(1.0, rank.rank())));
  return grad_norm({slot}, {.norm_type = 1.0}).item<double>();
}

// The rank is 4 pp + 2 dp + tp. Along the mesh `distinct`, ranks have different parameters.
TEST_ON_MESH(GradNorm, CountsDistinctParametersAlongAMeshDimension, {2, 2, 2}, {"pp", "dp", "tp"}) {
  EXPECT_EQ(norm_on(rank, mesh["dp"]), 1.0);
  EXPECT_EQ(norm_on(rank, mesh["dp"], mesh["pp"]), 1.0 + 16.0);
  EXPECT_EQ(norm_on(rank, mesh["dp"], mesh["tp"]), 1.0 + 2.0);
  EXPECT_EQ(norm_on(rank, mesh["dp"], mesh[{"pp", "tp"}]), 1.0 + 2.0 + 16.0 + 32.0);
}

TEST_ON_MESH(GradNorm, CountsDistinctParametersOfAnUnflattenedMesh, {4}, {"world"}) {
  const DeviceMesh grid = mesh.unflatten("world", {2, 2}, {"ep", "edp"});
  EXPECT_EQ(norm_on(rank, grid["edp"], grid["ep"]), 1.0 + 4.0);
}

TEST_ON_RANKS(GradNorm, RefusesPartlyOverlappingMeshes, 3) {
  if (rank.rank() != 1) {
    return;
  }
  const DeviceMesh low(rank.world(), {0, 1}, MeshShape({2}, {"low"}));
  const DeviceMesh high(rank.world(), {1, 2}, MeshShape({2}, {"high"}));
  const std::vector<nn::SlotPtr> slots{slot_of(at::zeros({4}), low, {Shard{0}}),
                                       slot_of(at::zeros({4}), high, {Shard{0}})};
  EXPECT_ERROR(grad_norm(slots), "contains all ranks of the other");
}

// On one rank, one element of a sharded, replicated or plain gradient is infinite or NaN.
TEST_ON_MESH(GradNorm, IsNonfiniteOnAllRanksForOneNonfiniteElement, {2, 2}, {"dp", "tp"}) {
  const std::vector<nn::SlotPtr> slots{slot_of(at::zeros({4}), mesh, {Shard{0}, Shard{0}}),
                                       slot_of(at::zeros({2}), mesh["dp"], {Shard{0}}),
                                       slot_of(at::zeros({2}))};
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const double bad : {kInfinity, std::nan("")}) {
      for (const auto& [bad_rank, bad_slot] : {std::pair(0, 0U), {3, 0U}, {3, 1U}, {1, 2U}}) {
        for (const nn::SlotPtr& slot : slots) {
          set_grad(slot, at::ones(slot->persistent().sizes()));
        }
        if (rank.rank() == bad_rank) {
          local_tensor(slots[bad_slot]->persistent().grad()).fill_(bad);
        }
        const auto norm = grad_norm(slots, {.norm_type = p}).item<double>();
        EXPECT_FALSE(std::isfinite(norm)) << p << ", " << bad_rank << ", " << bad_slot;
      }
    }
  }
}

TEST(GradNorm, ThrowsOnAllRanksIfRequested) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    const nn::SlotPtr slot = slot_of(at::zeros({3}), rank.mesh({3}, {"dp"}), {Shard{0}});
    set_grad(slot, at::tensor({1.0, 2.0, kInfinity}).to(at::kFloat));
    clip_grad_norm_({slot}, 1.0, {.error_if_nonfinite = true});
  });
  EXPECT_CONTAINS(errors, "norm of the gradients is inf");
}

// In fp16, the square of 300 is infinite, and the clipping factor would be rounded.
TEST(GradNorm, ComputesNarrowGradientsInFp32) {
  const nn::SlotPtr narrow = slot_of(at::zeros({2}, at::kHalf));
  const nn::SlotPtr wide = slot_of(at::zeros({1}, at::kDouble));
  set_grad(narrow, at::full({2}, 300.0, at::kHalf));
  set_grad(wide, at::full({1}, 1e-3, at::kDouble));
  EXPECT_NEAR(clip_grad_norm_({narrow, wide}, 30.0).item<double>(), 300.0 * std::sqrt(2.0), 1e-3);
  EXPECT_NEAR(narrow->get().grad()[0].item<double>(), 30.0 / std::sqrt(2.0), 0.01);
  EXPECT_NEAR(wide->get().grad()[0].item<double>(), 1e-4 / std::sqrt(2.0), 1e-10);
}

// The gradients are adjacent in one buffer, as FSDP allocates them.
TEST(GradNorm, ReadsGradientsThatShareABuffer) {
  const at::Tensor buffer = normal_values({12}, 3);
  const std::vector<nn::SlotPtr> slots{slot_of(at::zeros({2, 3})), slot_of(at::zeros({4}))};
  slots[0]->get().mutable_grad() = buffer.narrow(0, 0, 6).view({2, 3});
  slots[1]->get().mutable_grad() = buffer.narrow(0, 6, 4);
  const double expected = buffer.narrow(0, 0, 10).norm().item<double>();
  const at::Tensor scaled = buffer / (2 * expected);
  EXPECT_NEAR(clip_grad_norm_(slots, 0.5).item<double>(), expected, 1e-6 * expected);
  EXPECT_CLOSE(buffer.narrow(0, 0, 10), scaled.narrow(0, 0, 10), 1e-5);
  EXPECT_EQUAL(buffer.narrow(0, 10, 2), normal_values({12}, 3).narrow(0, 10, 2));
}

TEST(GradNorm, IsZeroWithoutGradientsAndRefusesInvalidCalls) {
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0.0F);
  EXPECT_EQ(clip_grad_norm_({slot_of(at::ones({2}))}, 1.0).item<float>(), 0.0F);
  EXPECT_ERROR(grad_norm({}, {.norm_type = 0.0}), "a 0-norm of gradients");
  EXPECT_ERROR(grad_norm({}, {.norm_type = -1.0}), "a -1-norm of gradients");
  EXPECT_ERROR(grad_norm({}, {.norm_type = std::nan("")}), "a nan-norm of gradients");
  EXPECT_ERROR(grad_norm({nullptr}), "with a null parameter");
}

TEST_ON_MESH(ClipGradNorm, RefusesUnequalPlainGradientsInDistributedModels, {3}, {"dp"}) {
  nn::Linear body(4, 6), head(6, 2);
  testing::fill(body);
  testing::fill(head);
  nn::distribute_parameter(*body.slot("weight"), mesh, {Shard{0}});
  std::vector<nn::SlotPtr> slots = slots_of(body);
  std::ranges::copy(slots_of(head), std::back_inserter(slots));
  for (const nn::SlotPtr& slot : slots) {
    slot->get().mutable_grad() = at::ones_like(slot->get());
  }
  EXPECT_NO_THROW(clip_grad_norm_(slots, 1));
  testing::Filled<nn::Linear> other(6, 2);
  other.weight->mutable_grad() = at::full({2, 6}, rank.rank() == 2 ? 2.0 : 1.0);
  std::ranges::copy(slots_of(other), std::back_inserter(slots));
  EXPECT_ERROR(clip_grad_norm_(slots, 1), "the gradient of parameter 'weight'", "ranks 0 and 2",
               "fsdp::fully_shard");
  EXPECT_ERROR(clip_grad_norm_(slots, 1), "ranks 0 and 2");
}

// A rank without gradients must call the collectives too, because other ranks wait for it.
TEST_ON_MESH(ClipGradNorm, ReducesPendingGradientsAndAcceptsMissingGradients, {2}, {"tp"}) {
  const nn::SlotPtr slot = slot_of(at::zeros({2}), mesh, {Replicate{}});
  const at::Tensor term = rank.rank() == 0 ? at::tensor({3.0F, 0.0F}) : at::tensor({0.0F, 4.0F});
  slot->get().mutable_grad() =
      DistributedTensor::from_local(term, mesh, {Partial{}}).tensor().detach();
  EXPECT_FLOAT_EQ(clip_grad_norm_({slot}, 1e9).item<float>(), 5.0F);
  const nn::SlotPtr sharded = slot_of(at::zeros({4}), mesh, {Shard{0}});
  if (rank.rank() == 0) {
    set_grad(sharded, at::tensor({3.0F, 4.0F, 0.0F, 0.0F}));
  }
  EXPECT_FLOAT_EQ(clip_grad_norm_({sharded}, 1e9).item<float>(), 5.0F);
}

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<nn::SlotPtr>)>;

std::vector<nn::SlotPtr> slots_of_type(c10::ScalarType type) {
  std::vector<nn::SlotPtr> slots;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    slots.push_back(slot_of(normal_values(kSizes[i], static_cast<std::int64_t>(i)).to(type)));
  }
  return slots;
}

void set_grads(const std::vector<nn::SlotPtr>& slots, int step) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    set_grad(slots[i], normal_values(kSizes[i], 100 * (step + 1) + static_cast<std::int64_t>(i))
                           .to(slots[i]->get().scalar_type()));
  }
}

/// Takes three steps with clipping. `fused`: Optimizer::step() applies the clipping factor.
std::vector<nn::SlotPtr> trained(const Make& make, c10::ScalarType type, bool fused) {
  std::vector<nn::SlotPtr> slots = slots_of_type(type);
  const std::unique_ptr<Optimizer> optimizer = make(slots);
  for (int step = 0; step < 3; ++step) {
    set_grads(slots, step);
    if (fused) {
      optimizer->step(clip_factor(slots, 0.5).factor);
    } else {
      clip_grad_norm_(slots, 0.5);
      optimizer->step();
    }
  }
  return slots;
}

void expect_same_bits(const Make& make, c10::ScalarType type) {
  EXPECT_EACH(tensors_of(trained(make, type, true)), tensors_of(trained(make, type, false)))
      << type;
}

TEST(ScaledStep, EqualsAStepAfterClipping) {
  const std::vector<Make> makers{
      [](auto slots) { return std::make_unique<AdamW>(std::move(slots), AdamWOptions{}); },
      [](auto slots) {
        return std::make_unique<AdamW>(std::move(slots),
                                       AdamWOptions{.moment_dtype = at::kBFloat16});
      },
      [](auto slots) {
        return std::make_unique<Sgd>(std::move(slots), SgdOptions{.momentum = 0.9});
      }};
  for (std::size_t i = 0; i < makers.size(); ++i) {
    SCOPED_TRACE(i);
    for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
      expect_same_bits(makers[i], type);
    }
  }
}

TEST(ScaledStep, SupportsMuonEmaAndOptimizerLists) {
  expect_same_bits(
      [](auto slots) -> std::unique_ptr<Optimizer> {
        const std::vector<nn::SlotPtr> matrices{slots[0], slots[2], slots[3]};
        return std::make_unique<Ema>(
            std::make_shared<OptimizerList>(std::vector<std::shared_ptr<Optimizer>>{
                std::make_shared<Muon>(matrices, MuonOptions{}),
                std::make_shared<AdamW>(std::vector<nn::SlotPtr>{slots[1]}, AdamWOptions{})}),
            0.9);
      },
      at::kFloat);
}

TEST(ClipFactor, KeepsGradientsAndReturnsTheClippingNorm) {
  const std::vector<nn::SlotPtr> slots = slots_of_type(at::kFloat);
  set_grads(slots, 0);
  const at::Tensor before = slots[0]->get().grad().clone();
  const ClipFactor clip = clip_factor(slots, 0.5);
  EXPECT_EQUAL(slots[0]->get().grad(), before);
  EXPECT_EQUAL(clip.norm, clip_grad_norm_(slots, 0.5));
  EXPECT_NEAR(clip.factor.item<double>(), 0.5 / clip.norm.item<double>(), 1e-6);
  EXPECT_EQUAL(slots[0]->get().grad(), before * clip.factor.to(at::kFloat));
  EXPECT_EQ(clip_factor(slots, 1e9).factor.item<double>(), 1.0);
  EXPECT_ERROR(clip_factor({}, -1), "max_norm -1");
}

TEST(ScaledStep, ChangesNothingForNonfiniteGradients) {
  for (const c10::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
      for (const double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
        const std::vector<nn::SlotPtr> slots = slots_of_type(type);
        AdamW optimizer(slots, {.moment_dtype = moments});
        set_grads(slots, 0);
        optimizer.step(clip_factor(slots, 0.5).factor);
        const std::vector<at::Tensor> before = tensors_of(optimizer);
        set_grads(slots, 1);
        slots[1]->get().grad().fill_(bad);
        const ClipFactor clip = clip_factor(slots, 0.5);
        EXPECT_TRUE(std::isnan(clip.factor.item<double>()));
        optimizer.step(clip.factor);
        EXPECT_EACH(tensors_of(optimizer), before);
      }
    }
  }
}

TEST(ClipAndStep, ClipsAndSkipsOverflowedSteps) {
  for (const bool enabled : {true, false}) {
    const std::vector<nn::SlotPtr> slots = slots_of_type(at::kFloat);
    set_grads(slots, 0);
    GradScaler scaler({.enabled = enabled, .init_scale = 1.0});
    Sgd optimizer(slots, {.lr = 1.0});
    const at::Tensor before = slots[1]->get().detach().clone();
    const at::Tensor grad = slots[1]->get().grad().clone();
    const auto [norm, stepped] = scaler.clip_and_step(optimizer, slots, 0.5);
    EXPECT_TRUE(stepped);
    const at::Tensor after = before - grad * (0.5 / (norm.item<double>() + 1e-6));
    EXPECT_CLOSE(slots[1]->get().detach(), after);
    set_grads(slots, 1);
    slots[0]->get().grad().fill_(INFINITY);
    EXPECT_FALSE(scaler.clip_and_step(optimizer, slots, 0.5).second);
    EXPECT_CLOSE(slots[1]->get().detach(), after);
  }
}

}  // namespace
}  // namespace tessera::optim

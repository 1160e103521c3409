// Norms of gradients of any order over any mix of meshes, clipping, and a step that multiplies the
// gradients by a factor on their device, as clipping before it would.

#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "optim/parameters.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "testing/module_values.h"

namespace tessera::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Gives each slot a gradient, clips by libtorch and by ours, compares norms and gradients.
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

// 1 row over 4 ranks leaves three of them nothing.
TEST_ON_MESH(GradNorm, OverOneMeshDimensionWithEmptyShards, {4}, {"dp"}) {
  expect_all_norms({slot_of(at::zeros({7, 5}), mesh, {Shard{0}}),
                    slot_of(at::zeros({1, 4}), mesh, {Shard{0}}),
                    slot_of(at::zeros({8}), mesh, {Replicate{}})});
}

TEST_ON_MESH(GradNorm, OverTwoMeshDimensionsASubmeshAndPlainOnes, {3, 2}, {"dp", "tp"}) {
  expect_all_norms({slot_of(at::zeros({7, 5}), mesh, {Shard{0}, Shard{0}}),
                    slot_of(at::zeros({5}), mesh, {Shard{0}, Replicate{}}),
                    slot_of(at::zeros({3, 4}), mesh["tp"], {Shard{1}}),
                    slot_of(at::zeros({3}), mesh["dp"], {Replicate{}}),
                    slot_of(at::zeros({2, 2}))});
}

// Plain gradients are not reduced, so that one of them may overflow on one rank alone.
TEST(GradNorm, IsNonFiniteEverywhereIfAPlainGradientOfOneRankIs) {
  for (const double p : {2.0, kInfinity}) {
    RunOnMesh({4}, {"dp"}, [p](Rank& rank, const DeviceMesh& mesh) {
      const std::vector slots{slot_of(at::zeros({7}), mesh, {Shard{0}}), slot_of(at::zeros({2}))};
      set_grad(slots[0], normal_values({7}, 1));
      set_grad(slots[1], at::full({2}, rank.rank() == 1 ? kInfinity : 1.0));
      EXPECT_FALSE(std::isfinite(grad_norm(slots, {.norm_type = p}).item<double>()));
    });
  }
}

// HSDP: shards of three ranks, on two replicas.
TEST_ON_MESH(GradNorm, CountsReplicasOfShardsOnce, {2, 3}, {"replicate", "shard"}) {
  expect_all_norms({slot_of(at::zeros({7, 5}), mesh, {Replicate{}, Shard{0}}),
                    slot_of(at::zeros({2}), mesh, {Replicate{}, Shard{0}})});
}

// Two meshes made apart from each other, one of them of some ranks only.
TEST(GradNorm, OverSeveralMeshesInOneAllReduce) {
  RunOnMesh({4}, {"dp"}, [](Rank& rank, const DeviceMesh& all) {
    const DeviceMesh square = rank.mesh({2, 2}, {"a", "b"});
    const DeviceMesh pair(rank.world(),
                          rank.rank() < 2 ? std::vector<int>{0, 1} : std::vector{2, 3},
                          MeshShape({2}, {"pair"}));
    std::vector<nn::SlotPtr> slots{slot_of(at::zeros({6}), square, {Shard{0}, Replicate{}}),
                                   slot_of(at::zeros({5, 2}), all, {Shard{0}})};
    expect_all_norms(slots);
    // Different parameters on the two pairs: 3 and 4 make 5.
    const nn::SlotPtr own = slot_of(at::zeros({2}), pair, {Shard{0}});
    set_grad(own, at::tensor({rank.rank() < 2 ? 3.0F : 4.0F, 0.0F}));
    for (const nn::SlotPtr& slot : slots) {
      slot->persistent().mutable_grad().reset();
    }
    slots.push_back(own);
    const auto before = rank.world()->traffic().table();
    EXPECT_FLOAT_EQ(grad_norm(slots).item<float>(), 5.0F);
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
  });
}

// As the stages of a pipeline: each rank knows only its own mesh.
TEST_ON_MESH(GradNorm, OverAMeshThatNoParameterNames, {4}, {"world"}) {
  const bool first = rank.rank() < 2;
  const DeviceMesh stage(rank.world(), first ? std::vector<int>{0, 1} : std::vector{2, 3},
                         MeshShape({2}, {"dp"}));
  const nn::SlotPtr slot = slot_of(at::zeros({3}), stage, {Shard{0}});
  set_grad(slot, at::tensor({first ? 3.0F : 4.0F, 0.0F, 0.0F}));
  EXPECT_FLOAT_EQ(grad_norm({slot}).item<float>(), first ? 3.0F : 4.0F);
  const NormOptions both{.over = mesh};
  EXPECT_FLOAT_EQ(grad_norm({slot}, both).item<float>(), 5.0F);
}

/// The norm of slots on every rank; each has a gradient of one element: 2^k on rank k of `mesh`.
double norm_on(const Rank& rank, const DeviceMesh& mesh, const NormOptions& options) {
  const nn::SlotPtr slot = slot_of(at::zeros({1}), mesh, {Replicate{}});
  set_grad(slot, at::full({1}, std::ldexp(1.0, rank.rank())));
  return grad_norm({slot}, options).item<double>();
}

// On (2, 2, 2), slices along "dp": rank 4 pp + 2 dp + tp. Without a word rank 0's counts.
TEST_ON_MESH(GradNorm, CountsSlicesThatDifferAlongAMeshDimension, {2, 2, 2}, {"pp", "dp", "tp"}) {
  const auto norm = [&](std::vector<std::string> distinct, const DeviceMesh& over = {}) {
    return norm_on(rank, mesh["dp"],
                   {.norm_type = 1.0, .over = over, .distinct_along = std::move(distinct)});
  };
  EXPECT_EQ(norm({}), 1.0);
  EXPECT_EQ(norm({"pp"}), 1.0 + 16.0);
  EXPECT_EQ(norm({"tp"}), 1.0 + 2.0);
  EXPECT_EQ(norm({"pp", "tp"}), 1.0 + 2.0 + 16.0 + 32.0);
  EXPECT_EQ(norm({"pp"}, mesh.flatten()), 1.0 + 16.0);
  EXPECT_EQ(norm({"dp"}), 1.0);  // along which the slice lies
}

TEST_ON_MESH(GradNorm, CountsSlicesOfAMeshThatWasMadeOfOneDimension, {4}, {"world"}) {
  const DeviceMesh grid = mesh.unflatten("world", {2, 2}, {"ep", "edp"});
  const NormOptions options{.norm_type = 1.0, .over = grid, .distinct_along = {"ep"}};
  EXPECT_EQ(norm_on(rank, grid["edp"], options), 1.0 + 4.0);
}

TEST_ON_MESH(GradNorm, RefusesADimensionThatNoMeshHasBeforeItCommunicates, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(at::zeros({4}), mesh, {Shard{0}});
  const auto before = rank.world()->traffic().table();
  EXPECT_ERROR(grad_norm({slot}, {.distinct_along = {"ep"}}), "'ep'");
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 0);
}

// Copies agree, but for what went wrong on one rank.
TEST(GradNorm, IsNonFiniteEverywhereIfAnUncountedReplicaIs) {
  for (const double p : {2.0, kInfinity}) {
    RunOnMesh({2, 2}, {"dp", "tp"}, [p](Rank& rank, const DeviceMesh& mesh) {
      const nn::SlotPtr slot = slot_of(at::zeros({2}), mesh["dp"], {Shard{0}});
      set_grad(slot, at::ones({2}));
      if (rank.rank() == 3) {
        local_tensor(slot->persistent().grad()).fill_(kInfinity);
      }
      EXPECT_FALSE(std::isfinite(grad_norm({slot}, {.norm_type = p}).item<double>()));
    });
  }
}

TEST_ON_RANKS(GradNorm, RefusesMeshesThatDoNotContainEachOther, 3) {
  if (rank.rank() != 1) {
    return;
  }
  const DeviceMesh low(rank.world(), {0, 1}, MeshShape({2}, {"low"}));
  const DeviceMesh high(rank.world(), {1, 2}, MeshShape({2}, {"high"}));
  const std::vector<nn::SlotPtr> slots{slot_of(at::zeros({4}), low, {Shard{0}}),
                                       slot_of(at::zeros({4}), high, {Shard{0}})};
  EXPECT_ERROR(grad_norm(slots), "contains all ranks of the other");
}

TEST_ON_MESH(GradNorm, IsNonFiniteEverywhereIfOneElementIs, {4}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(at::zeros({4}), mesh, {Shard{0}});
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const double bad : {kInfinity, std::nan("")}) {
      for (int bad_rank = 0; bad_rank < 4; ++bad_rank) {
        set_grad(slot, at::ones({4}));
        if (rank.rank() == bad_rank) {
          local_tensor(slot->persistent().grad()).fill_(bad);
        }
        const auto norm = grad_norm({slot}, {.norm_type = p}).item<double>();
        EXPECT_EQ(std::isnan(norm), std::isnan(bad)) << norm;
        EXPECT_FALSE(std::isfinite(norm));
      }
    }
  }
}

TEST(GradNorm, ThrowsOnEveryRankIfAskedTo) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    const nn::SlotPtr slot = slot_of(at::zeros({3}), rank.mesh({3}, {"dp"}), {Shard{0}});
    set_grad(slot, at::tensor({1.0, 2.0, kInfinity}).to(at::kFloat));
    clip_grad_norm_({slot}, 1.0, {.error_if_nonfinite = true});
  });
  EXPECT_CONTAINS(errors, "norm of the gradients is inf");
}

// Squares of 300 overflow fp16, and its factor would lose digits.
TEST(GradNorm, ComputesNarrowGradientsInFp32) {
  const nn::SlotPtr narrow = slot_of(at::zeros({2}, at::kHalf));
  const nn::SlotPtr wide = slot_of(at::zeros({1}, at::kDouble));
  set_grad(narrow, at::full({2}, 300.0, at::kHalf));
  set_grad(wide, at::full({1}, 1e-3, at::kDouble));
  EXPECT_NEAR(clip_grad_norm_({narrow, wide}, 30.0).item<double>(), 300.0 * std::sqrt(2.0), 1e-3);
  EXPECT_NEAR(narrow->get().grad()[0].item<double>(), 30.0 / std::sqrt(2.0), 0.01);
  EXPECT_NEAR(wide->get().grad()[0].item<double>(), 1e-4 / std::sqrt(2.0), 1e-10);
}

// What FSDP hands out: pieces of one buffer.
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

TEST(GradNorm, Refusals) {
  EXPECT_ERROR(grad_norm({}, {.norm_type = 0.0}), "a 0-norm of gradients");
  EXPECT_ERROR(grad_norm({}, {.norm_type = -1.0}), "a -1-norm of gradients");
  EXPECT_ERROR(grad_norm({}, {.norm_type = std::nan("")}), "a nan-norm of gradients");
  EXPECT_ERROR(grad_norm({nullptr}), "with a null parameter");
}

TEST_ON_MESH(ClipGradNorm, RefusesPlainGradientsThatDifferBesideDistributedOnes, {3}, {"dp"}) {
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

TEST_ON_MESH(ClipGradNorm, ReducesPendingGradientsFirst, {2}, {"tp"}) {
  const nn::SlotPtr slot = slot_of(at::zeros({2}), mesh, {Replicate{}});
  const at::Tensor term = rank.rank() == 0 ? at::tensor({3.0F, 0.0F}) : at::tensor({0.0F, 4.0F});
  slot->get().mutable_grad() =
      DistributedTensor::from_local(term, mesh, {Partial{}}).tensor().detach();
  EXPECT_FLOAT_EQ(clip_grad_norm_({slot}, 1e9).item<float>(), 5.0F);
}

// A rank without any gradient still takes part: its peers must not hang.
TEST_ON_MESH(ClipGradNorm, AgreesWhenARankHasNoGradient, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(at::zeros({4}), mesh, {Shard{0}});
  if (rank.rank() == 0) {
    set_grad(slot, at::tensor({3.0F, 4.0F, 0.0F, 0.0F}));
  }
  EXPECT_FLOAT_EQ(clip_grad_norm_({slot}, 1e9).item<float>(), 5.0F);
}

TEST(ClipGradNorm, IsZeroWithoutParameters) {
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0.0F);
  EXPECT_EQ(clip_grad_norm_({slot_of(at::ones({2}))}, 1.0).item<float>(), 0.0F);
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

/// Three steps with clipping to a norm of 0.5, in two steps or in one.
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
  const std::vector<nn::SlotPtr> fused = trained(make, type, true);
  const std::vector<nn::SlotPtr> apart = trained(make, type, false);
  for (std::size_t i = 0; i < fused.size(); ++i) {
    EXPECT_EQUAL(fused[i]->get().detach(), apart[i]->get().detach()) << type << " " << i;
  }
}

TEST(ScaledStep, HasTheBitsOfClippingBefore) {
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

TEST(ScaledStep, OfMuonAnAverageAndAListToo) {
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

/// An optimizer that knows nothing of factors on a device.
class Plain final : public Optimizer {
 public:
  explicit Plain(std::vector<nn::SlotPtr> slots) : slots_(std::move(slots)) {}
  const std::vector<nn::SlotPtr>& parameters() const override { return slots_; }
  void scale_lr(double) override {}
  std::vector<StateTensor> state() override { return {}; }

 private:
  void update(double factor) override {
    const at::NoGradGuard no_grad;
    for (const nn::SlotPtr& slot : slots_) {
      slot->get().detach().sub_(slot->get().grad() * factor);
    }
  }
  std::vector<nn::SlotPtr> slots_;
};

TEST(ScaledStep, OfAnotherOptimizerMultipliesBefore) {
  expect_same_bits([](auto slots) { return std::make_unique<Plain>(std::move(slots)); },
                   at::kFloat);
}

TEST(ClipFactor, LeavesGradientsAndHasTheNormOfClipping) {
  const std::vector<nn::SlotPtr> slots = slots_of_type(at::kFloat);
  set_grads(slots, 0);
  const at::Tensor before = slots[0]->get().grad().clone();
  const ClipFactor clip = clip_factor(slots, 0.5);
  EXPECT_EQUAL(slots[0]->get().grad(), before);
  EXPECT_EQUAL(clip.norm, clip_grad_norm_(slots, 0.5));
  EXPECT_NEAR(clip.factor.item<double>(), 0.5 / clip.norm.item<double>(), 1e-6);
  EXPECT_EQUAL(slots[0]->get().grad(), before * clip.factor.to(at::kFloat));
  EXPECT_EQ(clip_factor(slots, 1e9).factor.item<double>(), 1.0);
}

TEST(ClipFactor, ANegativeNormIsRefused) {
  EXPECT_ERROR(clip_factor({}, -1), "to a norm of -1");
}

/// Two ranks, of which each has a part of the gradients.
TEST_ON_MESH(ClipFactor, IsTheSameOnEveryRank, {2}, {"dp"}) {
  const nn::SlotPtr slot = slot_of(at::ones({3}), mesh, {Shard{0}});
  set_grad(slot, at::full({3}, 2.0));
  EXPECT_NEAR(clip_factor({slot}, 1.0).factor.item<double>(), 1 / std::sqrt(12.0), 1e-6);
}

/// The optimizer's state and the parameters, copied.
std::vector<at::Tensor> values_of(Optimizer& optimizer) {
  std::vector<at::Tensor> values;
  for (const nn::SlotPtr& slot : optimizer.parameters()) {
    values.push_back(slot->get().detach().clone());
  }
  for (const StateTensor& each : optimizer.state()) {
    values.push_back(each.tensor.clone());
  }
  return values;
}

/// On a CPU, for each kind of update: fused kernels, moments in bf16, parameters in bf16.
TEST(ScaledStep, ChangesNothingByGradientsThatAreNotFinite) {
  for (const c10::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
      for (const double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
        const std::vector<nn::SlotPtr> slots = slots_of_type(type);
        AdamW optimizer(slots, {.moment_dtype = moments});
        set_grads(slots, 0);
        optimizer.step(clip_factor(slots, 0.5).factor);
        const std::vector<at::Tensor> before = values_of(optimizer);
        set_grads(slots, 1);
        slots[1]->get().grad().fill_(bad);
        const ClipFactor clip = clip_factor(slots, 0.5);
        EXPECT_TRUE(std::isnan(clip.factor.item<double>()));
        optimizer.step(clip.factor);
        const std::vector<at::Tensor> after = values_of(optimizer);
        for (std::size_t i = 0; i < before.size(); ++i) {
          EXPECT_EQUAL(after[i], before[i]) << i;
        }
      }
    }
  }
}

std::pair<double, bool> clipped_step(bool enabled) {
  const std::vector<nn::SlotPtr> slots = slots_of_type(at::kFloat);
  set_grads(slots, 0);
  GradScaler scaler({.enabled = enabled, .init_scale = 1.0});
  Sgd optimizer(slots, {.lr = 1.0});
  const at::Tensor before = slots[1]->get().detach().clone();
  const at::Tensor grad = slots[1]->get().grad().clone();
  const auto [norm, stepped] = scaler.clip_and_step(optimizer, slots, 0.5);
  const at::Tensor expected = before - grad * (0.5 / (norm.item<double>() + 1e-6));
  EXPECT_CLOSE(slots[1]->get().detach(), expected);
  return {norm.item<double>(), stepped};
}

TEST(ClipAndStep, ClipsWithLossScalingAndWithout) {
  EXPECT_EQ(clipped_step(true), clipped_step(false));
  EXPECT_TRUE(clipped_step(true).second);
}

TEST(ClipAndStep, SkipsWhatOverflowed) {
  const nn::SlotPtr slot = slot_of(at::ones({2}));
  set_grad(slot, at::full({2}, INFINITY));
  GradScaler scaler;
  Sgd optimizer({slot}, {.lr = 1.0});
  EXPECT_FALSE(scaler.clip_and_step(optimizer, {slot}, 1.0).stepped);
  EXPECT_EQUAL(slot->get().detach(), at::ones({2}));
}

}  // namespace
}  // namespace tessera::optim

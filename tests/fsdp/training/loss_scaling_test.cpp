// Training in fp16 with a GradScaler.
#include <gtest/gtest.h>

#include <cmath>

#include "small_model.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/grad_scaler.h"

namespace tessera::fsdp {
namespace {

using testing::full_tensor;
using testing::SmallModel;

constexpr std::int64_t kRows = 8;
constexpr std::int64_t kDim = 6;
constexpr int kSteps = 4;

void shard(SmallModel& model, const DeviceMesh& mesh, const Options& options) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh, options);
  }
  fully_shard(model, mesh, options);
}

/// Losses times 1e-6: their gradients are below what fp16 can hold.
at::Tensor tiny_loss(SmallModel& model, const at::Tensor& batch) {
  return model(batch).to(at::kFloat).square().mean() * 1e-6;
}

at::Tensor batch_of(int step, std::int64_t part, std::int64_t parts, c10::ScalarType dtype) {
  const std::int64_t rows = kRows / parts;
  return testing::uniform_values({kRows, kDim}, 50 + step).narrow(0, part * rows, rows).to(dtype);
}

/// One process, fp32, unscaled.
std::vector<at::Tensor> reference() {
  testing::Filled<SmallModel> model(kDim, 10, 3, 2);
  optim::AdamW optimizer(model, {.lr = 0.01, .eps = 1e-15});
  for (int step = 0; step < kSteps; ++step) {
    tiny_loss(model, batch_of(step, 0, 1, at::kFloat)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, slot] : model.named_slots()) {
    parameters.push_back(slot->get().detach());
  }
  return parameters;
}

void train(SmallModel& model, optim::GradScaler& scaler, std::int64_t part, std::int64_t parts,
           c10::ScalarType dtype) {
  optim::AdamW optimizer(model, {.lr = 0.01, .eps = 1e-15});
  for (int step = 0; step < kSteps; ++step) {
    scaler.scale(tiny_loss(model, batch_of(step, part, parts, dtype))).backward();
    const at::Tensor norm = scaler.clip_grad_norm_(optimizer.parameters(), 1e9);
    EXPECT_GT(norm.item<double>(), 0.0);
    EXPECT_LT(norm.item<double>(), 1e-4);
    EXPECT_TRUE(scaler.step(optimizer));
    optimizer.zero_grad();
  }
}

void expect_near_reference(const SmallModel& model, double tolerance) {
  const std::vector<at::Tensor> expected = reference();
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor found = full_tensor(slot->persistent()).to(at::kFloat);
    const at::Tensor difference = (found - expected[i++]).abs();
    EXPECT_LT(difference.mean().item<double>(), tolerance) << name;
  }
}

// fp32 parameters, gathered and computed with in fp16. A step moves a parameter by 0.01.
TEST(LossScaling, SafeModeTrainsAsFp32) {
  RunRanks(4, [](Rank& rank) {
    testing::Filled<SmallModel> model(kDim, 10, 3, 2);
    shard(model, rank.mesh({2, 2}, {"replicate", "shard"}),
          {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
    optim::GradScaler scaler;
    train(model, scaler, rank.rank(), 4, at::kHalf);
    EXPECT_EQ(model.head->slot("weight")->persistent().scalar_type(), at::kFloat);
    expect_near_reference(model, 1e-3);
  });
}

// fp16 parameters and gradients: what is left is their rounding.
TEST(LossScaling, MemoryEfficientModeTrainsAsFp32) {
  RunRanks(4, [](Rank& rank) {
    testing::Filled<SmallModel> model(kDim, 10, 3, 2);
    for (const auto& [name, slot] : model.named_slots()) {
      slot->set(slot->get().detach().to(at::kHalf).requires_grad_());
    }
    shard(model, rank.mesh({4}, {"dp"}), {.mp_policy = {.reduce_dtype = at::kFloat}});
    optim::GradScaler scaler(optim::GradScalerOptions::memory_efficient());
    train(model, scaler, rank.rank(), 4, at::kHalf);
    EXPECT_EQ(model.head->slot("weight")->persistent().scalar_type(), at::kHalf);
    expect_near_reference(model, 2e-3);
  });
}

// Rank 3's samples overflow; the others' do not.
TEST(LossScaling, AnOverflowOnOneRankLeavesTheStepOutOnAll) {
  RunRanks(4, [](Rank& rank) {
    const auto skips = [&](const DeviceMesh& mesh) {
      testing::Filled<SmallModel> model(kDim, 10, 3, 1);
      shard(model, mesh, {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
      optim::AdamW optimizer(model, {.lr = 0.01});
      optim::GradScaler scaler({.init_scale = 1024.0});
      const at::Tensor before = full_tensor(model.head->slot("weight")->persistent()).clone();
      at::Tensor batch = batch_of(0, rank.rank(), 4, at::kHalf);
      if (rank.rank() == 3) {
        batch = at::full_like(batch, 6e4);
      }
      scaler.scale(tiny_loss(model, batch)).backward();
      EXPECT_FALSE(
          std::isfinite(scaler.clip_grad_norm_(optimizer.parameters(), 1.0).item<double>()));
      EXPECT_FALSE(scaler.step(optimizer));
      EXPECT_EQ(scaler.scale(), 512.0);
      EXPECT_TRUE(full_tensor(model.head->slot("weight")->persistent()).equal(before));
    };
    skips(rank.mesh({4}, {"dp"}));
    skips(rank.mesh({2, 2}, {"replicate", "shard"}));
  });
}

}  // namespace
}  // namespace tessera::fsdp

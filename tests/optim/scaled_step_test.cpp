// A step that multiplies the gradients by a factor on their device, as clipping before it would.
#include "optim/parameters.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

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

// Tests properties of all optimizers, OptimizerList, Ema, Sgd, and learning rate schedules.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <limits>

#include "optim/parameters.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/slot_optimizer.h"

namespace tessera::optim {
namespace {

nn::SlotPtr with_grad(double value, double grad, c10::ScalarType dtype = at::kFloat) {
  const nn::SlotPtr slot = slot_of(at::full({2}, value, dtype));
  set_grad(slot, at::full({2}, grad, dtype));
  return slot;
}

float value(const nn::SlotPtr& slot) {
  return slot->get().detach()[0].item<float>();
}

/// Makes slots whose parameters are adjacent in memory, and whose gradients are adjacent too.
std::vector<nn::SlotPtr> side_by_side(const std::vector<at::Tensor>& values) {
  const at::Tensor memory = at::cat(values);
  const at::Tensor gradients = memory.cos();
  std::vector<nn::SlotPtr> slots;
  std::int64_t offset = 0;
  for (const at::Tensor& value : values) {
    const at::Tensor tensor = memory.narrow(0, offset, value.numel()).requires_grad_();
    tensor.mutable_grad() = gradients.narrow(0, offset, value.numel());
    slots.push_back(std::make_shared<nn::ParameterSlot>(tensor, true));
    offset += value.numel();
  }
  return slots;
}

using MakeOptimizer = std::shared_ptr<Optimizer> (*)(const std::vector<nn::SlotPtr>&);

/// Takes three steps. Returns the parameter `slots[index]` and its optimizer state.
at::Tensor trained(MakeOptimizer make, const std::vector<nn::SlotPtr>& slots, std::size_t index) {
  const std::shared_ptr<Optimizer> optimizer = make(slots);
  for (int step = 0; step < 3; ++step) {
    optimizer->step();
  }
  std::vector<at::Tensor> all{slots[index]->persistent().detach()};
  for (const StateTensor& state : optimizer->state()) {
    if (state.slot == slots[index]) {
      all.push_back(state.tensor.reshape({-1}));
    }
  }
  return at::cat(all);
}

// A parameter's update must not depend on which parameters are adjacent in memory.
TEST(Optimizer, UpdatesDoNotDependOnAdjacentParameters) {
  const auto adamw = [](const std::vector<nn::SlotPtr>& slots) -> std::shared_ptr<Optimizer> {
    return std::make_shared<AdamW>(slots, AdamWOptions{.lr = 0.03, .weight_decay = 0.05});
  };
  const auto sgd = [](const std::vector<nn::SlotPtr>& slots) -> std::shared_ptr<Optimizer> {
    return std::make_shared<Sgd>(slots,
                                 SgdOptions{.lr = 0.03, .momentum = 0.9, .weight_decay = 0.05});
  };
  const at::Tensor value = normal_values({69}, 1);
  for (const MakeOptimizer make : {MakeOptimizer(adamw), MakeOptimizer(sgd)}) {
    const at::Tensor alone = trained(make, side_by_side({value}), 0);
    for (const std::int64_t other : {1, 7, 8, 16, 27, 32}) {
      const at::Tensor neighbour = normal_values({other}, 2);
      EXPECT_EQUAL(trained(make, side_by_side({neighbour, value}), 1), alone) << other;
      EXPECT_EQUAL(trained(make, side_by_side({value, neighbour}), 0), alone) << other;
    }
  }
}

TEST(Optimizer, RefusesInvalidRatesSetBetweenSteps) {
  const nn::SlotPtr slot = with_grad(1.0, 1.0);
  Sgd optimizer({slot}, {.lr = 0.5});
  for (const double lr : {std::nan(""), -0.1, HUGE_VAL}) {
    optimizer.options().lr = lr;
    EXPECT_ERROR(optimizer.step(), "a learning rate of", "in group 0");
  }
  optimizer.options().lr = 0.5;
  optimizer.scale_lr(std::nan(""));
  EXPECT_ERROR(optimizer.step(), "a learning rate of nan");
  EXPECT_FLOAT_EQ(value(slot), 1.0F);
}

TEST(Optimizer, AppliesTheOptionsOfEachGroup) {
  const nn::SlotPtr a = with_grad(1.0, 1.0);
  const nn::SlotPtr b = with_grad(1.0, 1.0);
  Sgd optimizer({{{a}, {.lr = 0.1}}, {{b}, {.lr = 0.2, .weight_decay = 1.0}}});
  optimizer.step();
  EXPECT_FLOAT_EQ(value(a), 0.9F);
  EXPECT_FLOAT_EQ(value(b), 0.6F);
  optimizer.options(1).weight_decay = 0;
  optimizer.scale_lr(0.5);
  for (const nn::SlotPtr& slot : {a, b}) {
    set_grad(slot, at::full({2}, 1.0));
  }
  optimizer.step();
  EXPECT_FLOAT_EQ(value(a), 0.85F);
  EXPECT_FLOAT_EQ(value(b), 0.5F);
}

TEST_ON_MESH(Optimizer, NamesAndShardsStateLikeParameters, {2}, {"dp"}) {
  nn::Linear linear(3, 5);
  for (const auto& [name, slot] : linear.named_slots()) {
    slot->set(slot_of(normal_values(slot->get().sizes().vec(), 0), mesh, {Shard{0}})->get());
  }
  AdamW optimizer(linear, {});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : named_state(optimizer, linear)) {
    names.push_back(name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"weight.exp_avg", "weight.exp_avg_sq", "weight.step",
                                             "bias.exp_avg", "bias.exp_avg_sq", "bias.step"}));
  const at::Tensor state = named_state(optimizer, linear)[0].second;
  EXPECT_TRUE(sharding_spec(state) == sharding_spec(linear.weight));
  EXPECT_EQ(state.sizes(), linear.weight->sizes());
}

TEST(Optimizer, RefusesInvalidCalls) {
  const nn::SlotPtr slot = with_grad(1.0, 1.0);
  EXPECT_ERROR(Sgd({{{slot}, {.lr = 0.1}}, {{slot}, {.lr = 0.2}}}), "is in the groups 0 and 1");
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{nullptr}, {}), "null slot in group 0");
  EXPECT_ERROR(AdamW(std::vector<nn::SlotPtr>{}, {}), "given no parameters", "slots_of");
  EXPECT_ERROR(OptimizerList({nullptr}), "OptimizerList was given a null optimizer");
  const auto one = std::make_shared<Sgd>(std::vector{slot}, SgdOptions{});
  const auto two = std::make_shared<AdamW>(std::vector{slot}, AdamWOptions{});
  EXPECT_ERROR(OptimizerList({one, two}), "two optimizers of an OptimizerList");
  Sgd optimizer({with_grad(1.0, 1.0)}, {.lr = 0.5});
  EXPECT_ERROR(optimizer.options(3), "group 3 of an optimizer with 1", "numbered from 0");
  {
    Sgd optimizer({slot_of(at::ones({2}))}, {.momentum = 0.9});
    const nn::Linear other(2, 2);
    EXPECT_ERROR(named_state(optimizer, other),
                 "a parameter of sizes [2], which the passed module");
  }
}

TEST(Optimizer, CountsStepsOfEachParameter) {
  const nn::SlotPtr a = with_grad(1.0, 1.0);
  const nn::SlotPtr b = with_grad(1.0, 1.0);
  const AdamWOptions options{.lr = 0.1, .weight_decay = 0.0};
  AdamW both({a, b}, options);
  both.step();
  a->get().mutable_grad().reset();
  set_grad(b, at::full({2}, 2.0));
  both.step();
  const nn::SlotPtr alone = with_grad(1.0, 1.0);
  AdamW reference({alone}, options);
  reference.step();
  EXPECT_EQ(value(a), value(alone));
  set_grad(alone, at::full({2}, 2.0));
  reference.step();
  EXPECT_EQ(value(b), value(alone));
}

/// A load can give adjacent shards different step counters. The optimizer must then update these
/// shards separately.
TEST(Optimizer, RespectsLoadedStepCounters) {
  nn::Linear linear(16, 16);
  const nn::SlotPtr weight = linear.named_slots()[0].second, bias = linear.named_slots()[1].second;
  const at::Tensor values = at::ones({272}), gradients = at::ones({272});
  weight->set(values.narrow(0, 0, 256).view({16, 16}).detach().requires_grad_());
  bias->set(values.narrow(0, 256, 16).detach().requires_grad_());
  AdamW optimizer(linear, {.lr = 0.1});
  const auto state = named_state(optimizer, linear);
  const auto step = [&] {
    weight->persistent().mutable_grad() = gradients.narrow(0, 0, 256).view({16, 16});
    bias->persistent().mutable_grad() = gradients.narrow(0, 256, 16);
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  for (const auto& [name, tensor] : state) {
    tensor.fill_(name == "weight.step" ? 7 : 0);
  }
  const at::Tensor before = bias->get().detach().clone();
  step();
  // The bias was loaded with a state of zeros, so this step must equal a first step.
  EXPECT_CLOSE(bias->get().detach(), before * (1 - 0.1 * 1e-2) - 0.1);
}

class CountedSteps final : public GroupedOptimizer<SgdOptions> {
 public:
  explicit CountedSteps(std::vector<nn::SlotPtr> slots)
      : GroupedOptimizer({{std::move(slots), {.lr = 1}}}, /*state_names=*/{},
                         /*counts_steps=*/true) {}

 private:
  void update_batch(const Batch& batch, std::size_t /*group*/) override {
    for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
      batch.parameters[i].sub_(batch.steps[i]);
    }
  }
};

TEST(Optimizer, CountsStepsWithoutOtherState) {
  const nn::SlotPtr a = with_grad(1.0, 1.0), b = with_grad(1.0, 1.0);
  CountedSteps optimizer({a, b});
  optimizer.step();
  optimizer.step();
  EXPECT_EQ(value(a), -2);
  EXPECT_EQ(value(b), -2);
  EXPECT_EQ(optimizer.state().front().tensor.item<double>(), 2);
}

TEST(OptimizerList, StepsAndSchedulesAllOptimizers) {
  const nn::SlotPtr a = with_grad(1.0, 1.0);
  const nn::SlotPtr b = with_grad(1.0, 1.0);
  OptimizerList list({std::make_shared<Sgd>(std::vector{a}, SgdOptions{.lr = 0.5}),
                      std::make_shared<Sgd>(std::vector{b}, SgdOptions{.lr = 0.25})});
  list.scale_lr(0.5);
  list.step();
  EXPECT_FLOAT_EQ(value(a), 0.75F);
  EXPECT_FLOAT_EQ(value(b), 0.875F);
  list.zero_grad();
  EXPECT_FALSE(a->get().grad().defined());
  EXPECT_EQ(list.parameters().size(), 2U);
}

TEST(SplitForMuon, ExcludesEmbeddingsAndNamedParameters) {
  struct Model : nn::Module<Model> {
    Model() { tied->tie_slot("weight", embed->slot("weight")); }
    nn::Child<nn::Embedding> embed{*this, "embed", 7, 4};
    nn::Child<nn::Linear> up{*this, "up", 4, 6}, tied{*this, "tied", 4, 7};
    nn::Child<nn::Linear> head{*this, "head", 4, 3};
  } model;
  const MuonSplit split = split_for_muon(model, {"head.weight"});
  ASSERT_EQ(split.matrices.size(), 1U);
  EXPECT_EQ(split.matrices[0], model.up->slot("weight"));
  EXPECT_EQ(split.rest.size(), model.named_slots().size() - 1);
}

TEST(SplitForMuon, ExcludesEmbeddingsOfLibtorch) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("embed", torch::nn::Embedding(7, 4));
      register_module("bag", torch::nn::EmbeddingBag(7, 4));
      register_module("up", torch::nn::Linear(4, 6));
    }
  };
  const auto adopted = nn::adopt(std::make_shared<Net>());
  const MuonSplit split = split_for_muon(*adopted, {});
  ASSERT_EQ(split.matrices.size(), 1U);
  EXPECT_EQ(split.matrices[0]->persistent().sizes(), (std::vector<std::int64_t>{6, 4}));
  const nn::Hooked<torch::nn::Embedding> hooked(7, 4);
  EXPECT_TRUE(split_for_muon(hooked, {}).matrices.empty());
}

TEST(SplitForMuon, RefusesAPatternThatMatchesNothing) {
  const nn::Linear model(4, 3);
  EXPECT_ERROR(split_for_muon(model, {"weight", "lm_head.weigth"}),
               "split_for_muon: the pattern 'lm_head.weigth' matches none of the 2 parameters");
}

TEST(Optimizer, HasNoStateOfFrozenParameters) {
  const nn::SlotPtr trained = slot_of(at::ones({2}));
  const nn::SlotPtr frozen = slot_of(at::ones({3}));
  frozen->persistent().requires_grad_(false);
  AdamW optimizer({trained, frozen}, {});
  for (const StateTensor& state : optimizer.state()) {
    EXPECT_EQ(state.slot, trained) << state.name;
  }
  // If a parameter is frozen after some steps, its optimizer state must remain.
  set_grad(trained, at::ones({2}));
  optimizer.step();
  trained->persistent().requires_grad_(false);
  EXPECT_EQ(optimizer.state().size(), 3u);
}

// SignSgd is the example in tessera/optim/slot_optimizer.h.

struct SignSgdOptions {
  double lr = 1e-3;
};

class SignSgd final : public GroupedOptimizer<SignSgdOptions> {
 public:
  SignSgd(const nn::ModuleBase& module, SignSgdOptions options)
      : GroupedOptimizer({{slots_of(module), options}}, /*state_names=*/{},
                         /*counts_steps=*/false) {}

 private:
  void update_batch(const Batch& batch, std::size_t group) override {
    at::_foreach_sign_(batch.gradients);
    at::_foreach_add_(batch.parameters, batch.gradients, -lr(group));
  }
};

TEST(OptimizerExample, StepsByTheSignOfTheGradient) {
  nn::Linear linear(2, 3);
  for (const auto& [name, slot] : linear.named_slots()) {
    slot->get().detach().zero_();
    slot->set_initialized(true);
    slot->get().mutable_grad() = at::full(slot->get().sizes(), -7.0);
  }
  SignSgd optimizer(linear, {.lr = 0.5});
  optimizer.step();
  EXPECT_TRUE(linear.weight->equal(at::full({3, 2}, 0.5)));
  EXPECT_TRUE(linear.bias->equal(at::full({3}, 0.5)));
}

// The momentum of an fp16 parameter is fp32. Each step rounds the parameter only once.
TEST(Sgd, KeepsMomentumOfNarrowParametersInFp32) {
  const nn::SlotPtr slot = slot_of(at::ones({1}, at::kHalf));
  Sgd optimizer({slot}, {.lr = 1.0, .momentum = 1.0});
  const double tiny = 1.0 / 8192;
  double expected = 1.0;
  for (int step = 1; step <= 8; ++step) {
    set_grad(slot, at::full({1}, tiny, at::kHalf));
    optimizer.step();
    expected = at::scalar_tensor(expected - step * tiny, at::kDouble).to(at::kHalf).item<double>();
  }
  EXPECT_EQ(slot->get().item<double>(), expected);
  EXPECT_EQ(optimizer.state()[0].tensor.scalar_type(), at::kFloat);
  EXPECT_EQ(optimizer.state()[0].tensor.item<double>(), 8 * tiny);
}

TEST(Sgd, RefusesInvalidCalls) {
  const std::vector<nn::SlotPtr> slots{slot_of(at::ones({2}))};
  EXPECT_ERROR(Sgd(slots, {.lr = -1.0}), "SGD with lr -1");
  EXPECT_ERROR(Sgd(slots, {.lr = 0.1, .nesterov = true}), "Nesterov's momentum");
  const nn::SlotPtr slot = slot_of(at::ones({2}));
  Sgd optimizer({slot}, {.lr = 0.1});
  EXPECT_TRUE(optimizer.state().empty());
  optimizer.options().momentum = 0.9;
  set_grad(slot, at::ones({2}));
  EXPECT_ERROR(optimizer.step(), "an SGD without momentum");
}

at::Tensor complex_values(std::size_t i, std::uint64_t seed) {
  return at::view_as_complex(values_of(i, seed, /*is_complex=*/true));
}

TEST(ComplexParameters, SupportLazilyConjugatedGradients) {
  const nn::SlotPtr slot = slot_of(complex_values(0, 0));
  slot->persistent().mutable_grad() = complex_values(0, 100).conj();
  const at::Tensor expected =
      slot->persistent().detach().sub(slot->persistent().grad().resolve_conj(), 0.5);
  Sgd({slot}, {.lr = 0.5}).step();
  EXPECT_CLOSE(slot->persistent().detach(), expected, 1e-6, 1e-7);
}

double norm_of_absolutes(double p) {
  double sum = 0;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    const at::Tensor absolutes = complex_values(i, 100).abs().to(at::kDouble);
    sum = std::isinf(p) ? std::max(sum, absolutes.max().item<double>())
                        : sum + absolutes.pow(p).sum().item<double>();
  }
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

TEST_ON_MESH(ComplexParameters, AreClippedByTheirAbsoluteValues, {4}, {"dp"}) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    std::vector<nn::SlotPtr> slots;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      slots.push_back(slot_of(complex_values(i, 0), mesh, {Shard{0}}));
      set_grad(slots[i], complex_values(i, 100));
    }
    const double norm = norm_of_absolutes(p);
    EXPECT_NEAR(clip_grad_norm_(slots, 0.5, {.norm_type = p}).item<double>(), norm, 1e-5 * norm);
    const at::Tensor clipped = full_tensor(slots[0]->persistent().grad());
    EXPECT_CLOSE(clipped, complex_values(0, 100).mul(0.5 / norm), 1e-4, 1e-6);
  }
}

TEST(ComplexParameters, AreRefusedByMuon) {
  const std::vector<nn::SlotPtr> slots{slot_of(complex_values(0, 0))};
  EXPECT_ERROR(Muon(slots, {}), "Muon", "ComplexFloat", "AdamW");
}

TEST(Ema, IsCorrectOnUnevenShards) {
  constexpr double kDecay = 0.8;
  RunOnMesh({3}, {"dp"}, [](const DeviceMesh& mesh) {
    for (const std::vector<std::int64_t>& sizes : kSizes) {
      const nn::SlotPtr slot = slot_of(normal_values(sizes, 1), mesh, {Shard{0}});
      const nn::SlotPtr frozen = slot_of(normal_values(sizes, 2), mesh, {Shard{0}});
      frozen->persistent().set_requires_grad(false);
      Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot, frozen}, SgdOptions{.lr = 0.5}),
              kDecay);
      at::Tensor expected = normal_values(sizes, 1);
      for (int step = 0; step < 3; ++step) {
        set_grad(slot, normal_values(sizes, 10 + static_cast<std::uint64_t>(step)));
        ema.step();
        ema.zero_grad();
        expected = kDecay * expected + (1 - kDecay) * full_tensor(slot->persistent());
      }
      const at::Tensor last = full_tensor(slot->persistent()).clone();
      // Ema::state() has one average per trained parameter, with the sharding of the parameter.
      const std::vector<StateTensor> state = ema.state();
      ASSERT_EQ(state.size(), 1u);
      EXPECT_EQ(state[0].name, "ema");
      EXPECT_EQ(sharding_spec(state[0].tensor), sharding_spec(slot->persistent()));
      EXPECT_CLOSE(state[0].tensor, expected, 1e-5, 1e-6);
      ema.swap();
      EXPECT_CLOSE(slot->persistent(), expected, 1e-5, 1e-6);
      ema.swap();
      EXPECT_EQUAL(slot->persistent(), last);
    }
  });
}

/// If a checkpoint loaded after state() has no averages, averages start as the loaded parameters.
TEST(Ema, BeginsWithLoadedAveragesOrCurrentParameters) {
  for (const bool loads : {true, false}) {
    const nn::SlotPtr slot = slot_of(at::ones({3}));
    Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{.lr = 1}), 0.5);
    EXPECT_EQUAL(ema.state()[0].tensor, at::ones({3}));
    {
      const c10::NoGradGuard no_grad;
      (loads ? ema.state()[0].tensor : slot->persistent().detach()).fill_(5);
    }
    set_grad(slot, at::ones({3}));
    ema.step();
    EXPECT_EQUAL(ema.state()[0].tensor, at::full({3}, loads ? 2.5 : 4.5));
  }
}

TEST(Ema, RefusesStepsAndStateAccessWhileSwapped) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{}), 0.5);
  ema.swap();
  for (const char* part : {"while the parameters hold the averages", "call swap() again first"}) {
    EXPECT_ERROR(ema.step(), part);
    EXPECT_ERROR(ema.step(at::ones({}, at::kDouble)), part);
    EXPECT_ERROR(ema.state(), part);
  }
  ema.swap();
  EXPECT_EQ(ema.state().size(), 1U);
}

TEST(Ema, ChecksAllParametersBeforeASwap) {
  const nn::SlotPtr slot = slot_of(at::ones({3}));
  const nn::SlotPtr narrow = slot_of(at::ones({3}, at::kBFloat16));
  Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot, narrow}, SgdOptions{.lr = 1}), 0.5);
  set_grad(slot, at::ones({3}));
  ema.step();
  EXPECT_ERROR(ema.swap(), "narrower type than its average");
  EXPECT_EQUAL(slot->persistent(), at::zeros({3}));
  EXPECT_EQ(ema.state().size(), 2U);
}

TEST(Ema, RefusesInvalidCalls) {
  const nn::SlotPtr slot = slot_of(at::ones({3}, at::kBFloat16));
  const auto sgd = std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{});
  EXPECT_ERROR(Ema(sgd, 1.0), "decay 1", "[0, 1)");
  EXPECT_ERROR(Ema(nullptr, 0.5), "null optimizer");
  {
    const nn::SlotPtr slot = slot_of(at::ones({3}));
    Ema ema(std::make_shared<Sgd>(std::vector<nn::SlotPtr>{slot}, SgdOptions{.lr = 1}), 0.5);
    EXPECT_EQ(ema.state().size(), 1U);
    slot->set(at::ones({2}).requires_grad_());
    set_grad(slot, at::ones({2}));
    EXPECT_ERROR(ema.step(), "has sizes [2] on cpu but had [3] on cpu when its average began");
    EXPECT_EQUAL(slot->persistent(), at::ones({2}));
  }
}

struct Row {
  const char* name;
  LrScheduleOptions options;
  std::vector<std::pair<int, double>> factors;
};

TEST(LrSchedule, GivesTheExpectedFactors) {
  const std::vector<Row> rows{
      {"warms up without a step at 0",
       {.schedule = Schedule::kConstant, .warmup = 3, .steps = 10},
       {{0, 1.0 / 3}, {1, 2.0 / 3}, {2, 1}, {3, 1}}},
      {"constant",
       {.schedule = Schedule::kConstant, .warmup = 0, .steps = 10},
       {{0, 1}, {5, 1}, {9, 1}, {10, 1}, {1000, 1}}},
      {"linear",
       {.schedule = Schedule::kLinear, .warmup = 2, .steps = 12},
       {{2, 1}, {7, 0.5}, {11, 0.1}, {12, 0}}},
      {"cosine",
       {.schedule = Schedule::kCosine, .warmup = 0, .steps = 8},
       {{0, 1}, {2, 0.8535533905932737}, {4, 0.5}, {6, 0.1464466094067263}, {8, 0}}},
      {"a warm-up as long as the run",
       {.schedule = Schedule::kCosine, .warmup = 5, .steps = 5},
       {{3, 0.8}, {5, 0}}},
      {"warm-up, stable, decay",
       {.schedule = Schedule::kWsd, .warmup = 2, .steps = 20, .decay_ratio = 0.2},
       {{0, 0.5}, {2, 1}, {16, 1}, {17, 0.75}, {19, 0.25}, {20, 0}}},
      {"to the smallest rate",
       {.schedule = Schedule::kLinear, .warmup = 2, .steps = 12, .min_factor = 0.1},
       {{0, 0.5}, {7, 0.55}, {12, 0.1}, {100, 0.1}}}};
  for (const Row& row : rows) {
    for (const auto& [step, factor] : row.factors) {
      EXPECT_NEAR(LrSchedule(row.options).factor(step), factor, 1e-15) << row.name << " " << step;
    }
  }
}

TEST(LrSchedule, StartsDecayAtThePeakWhenWarmupIsLong) {
  ::testing::internal::CaptureStderr();
  const LrSchedule schedule(
      {.schedule = Schedule::kWsd, .warmup = 6, .steps = 10, .decay_ratio = 0.8});
  EXPECT_CONTAINS(::testing::internal::GetCapturedStderr(),
                  "of 10 steps should decay in the last 8, but its warm-up takes the first 6; "
                  "the decay is shortened to the last 4");
  EXPECT_DOUBLE_EQ(schedule.factor(5), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(6), 1);
  EXPECT_DOUBLE_EQ(schedule.factor(7), 0.75);
  EXPECT_DOUBLE_EQ(schedule.factor(9), 0.25);
}

// Without the number of steps, a schedule can be constructed, but factor() must throw.
TEST(LrSchedule, RequiresStepsUnlessConstant) {
  EXPECT_EQ(LrSchedule({.warmup = 0}).factor(7), 1);
  for (const char* name : {"linear", "cosine", "wsd"}) {
    const LrSchedule unset({.schedule = parse_schedule(name), .warmup = 2});
    EXPECT_ERROR(unset.factor(0), name, "the number of steps of the run",
                 "LrScheduleOptions::steps");
  }
  EXPECT_ERROR(LrSchedule(LrScheduleOptions{}).factor(-1), "the learning rate of step -1");
  EXPECT_ERROR(LrSchedule({.decay_ratio = 1.5}), "decay_ratio 1.5");
  EXPECT_ERROR(LrSchedule({.min_factor = -0.5}), "min_factor -0.5", "from 0 to 1");
  EXPECT_ERROR(LrSchedule({.warmup = -1, .steps = 5}), "with a warm-up of -1");
  EXPECT_ERROR(LrSchedule({.steps = -5}), "a schedule of -5 steps");
  EXPECT_EQ(parse_schedule("constant"), Schedule::kConstant);
  EXPECT_ERROR(parse_schedule("cosin"), "schedule 'cosin'");
}

}  // namespace
}  // namespace tessera::optim

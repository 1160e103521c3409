#include "tessera/optim/adamw.h"

#include <torch/optim/sgd.h>

#include "optim/parameters.h"

namespace tessera::optim {
namespace {

const std::vector<SgdOptions> kCases{
    {.lr = 0.1},
    {.lr = 0.1, .weight_decay = 0.2},
    {.lr = 0.1, .momentum = 0.9},
    {.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.2}};

at::Tensor initial(std::size_t i) {
  return normal_values(kSizes[i], static_cast<std::int64_t>(i));
}

at::Tensor gradient(std::size_t i, int step) {
  return normal_values(kSizes[i], 100 * (step + 1) + static_cast<std::int64_t>(i));
}

/// Three steps by libtorch and by ours.
void expect_as_libtorch(const std::vector<nn::SlotPtr>& slots, const SgdOptions& options) {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    parameters.push_back(initial(i).requires_grad_());
  }
  torch::optim::SGD reference(parameters, torch::optim::SGDOptions(options.lr)
                                              .momentum(options.momentum)
                                              .nesterov(options.nesterov)
                                              .weight_decay(options.weight_decay));
  Sgd optimizer(slots, options);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      parameters[i].mutable_grad() = gradient(i, step);
      set_grad(slots[i], gradient(i, step));
    }
    reference.step();
    optimizer.step();
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_CLOSE(slots[i]->get(), parameters[i].detach(), 1e-6, 1e-6) << i;
  }
}

TEST(Sgd, AgreesWithLibtorch) {
  for (const SgdOptions& options : kCases) {
    expect_as_libtorch({slot_of(initial(0)), slot_of(initial(1))}, options);
  }
}

TEST_ON_MESH(Sgd, AgreesOnShardsOfOneMeshDimension, {4}, {"dp"}) {
  for (const SgdOptions& options : kCases) {
    expect_as_libtorch(
        {slot_of(initial(0), mesh, {Shard{0}}), slot_of(initial(1), mesh, {Shard{0}}),
         slot_of(initial(2), mesh, {Shard{0}}), slot_of(initial(3), mesh, {Replicate{}})},
        options);
  }
}

TEST_ON_MESH(Sgd, AgreesOnShardsOfTwoMeshDimensions, {2, 2}, {"dp", "tp"}) {
  expect_as_libtorch({slot_of(initial(0), mesh, {Shard{0}, Shard{0}}), slot_of(initial(1)),
                      slot_of(initial(2), mesh, {Shard{0}, Shard{1}}),
                      slot_of(initial(3), mesh["tp"], {Shard{1}})},
                     kCases.back());
}

// Sums in fp16 would stay at 1: each step is below half of its spacing there.
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

TEST(Sgd, HasNoStateWithoutMomentum) {
  EXPECT_TRUE(Sgd({slot_of(at::ones({2}))}, {.lr = 0.1}).state().empty());
}

TEST(Sgd, Refusals) {
  const std::vector<nn::SlotPtr> slots{slot_of(at::ones({2}))};
  EXPECT_ERROR(Sgd(slots, {.lr = -1.0}), "SGD with lr -1");
  EXPECT_ERROR(Sgd(slots, {.lr = 0.1, .nesterov = true}), "Nesterov's momentum");
  const nn::SlotPtr slot = slot_of(at::ones({2}));
  Sgd optimizer({slot}, {.lr = 0.1});
  optimizer.options().momentum = 0.9;
  set_grad(slot, at::ones({2}));
  EXPECT_ERROR(optimizer.step(), "made without momentum, which a group got since");
}

}  // namespace
}  // namespace tessera::optim

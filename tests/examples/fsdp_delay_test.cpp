// Ranks that come late to a stage of a step change no number.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "examples/llama/parallelize.h"
#include "examples/llama_run.h"
#include "testing/ranks.h"

namespace llama {
namespace {

using tessera::DeviceMesh;
using tessera::nn::ModuleBase;
using tessera::nn::TensorList;
using tessera::testing::Rank;
using tessera::testing::RunRanks;

/// Rank n of `ranks` comes 100 ms late to stages n, n + ranks, ...
class Delays {
 public:
  explicit Delays(const Rank& rank) : turn_(rank.rank()), ranks_(rank.size()) {}
  void stage() {
    if (stages_++ % ranks_ == turn_) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }

 private:
  int turn_, ranks_, stages_ = 0;
};

/// Before a block's forward, and before and after its backward.
void delay_block(Block& block, Delays& delays) {
  const auto stage = [&delays](const at::Tensor&) { delays.stage(); };
  block.add_forward_pre_hook([&delays, stage](ModuleBase&, TensorList inputs) {
    delays.stage();
    if (inputs[0]->requires_grad()) inputs[0]->register_hook(stage);
  });
  block.add_forward_hook(
      [stage](ModuleBase&, TensorList outputs) { outputs[0]->register_hook(stage); });
}

Outcome train_2d(Rank& rank, const Shape& shape, bool reshard_after_forward, Delays* delays) {
  const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
  const auto model = make_llama(shape);
  parallelize(*model, mesh, {.fsdp = {.reshard_after_forward = reshard_after_forward}});
  if (delays != nullptr) delay_block(*model->backbone().blocks().front(), *delays);
  if (delays != nullptr) delay_block(*model->backbone().blocks().back(), *delays);
  return train(*model, shape, {.part = mesh.local_rank("dp"), .parts = 2});
}

class FsdpDelays : public testing::TestWithParam<bool> {};

TEST_P(FsdpDelays, ChangeNoBit) {
  const bool reshard_after_forward = GetParam();
  Shape shape = kOddShape;
  shape.steps = 1;
  RunRanks(4, [&](Rank& rank) {
    const Outcome prompt = train_2d(rank, shape, reshard_after_forward, nullptr);
    Delays delays(rank);
    const Outcome late = train_2d(rank, shape, reshard_after_forward, &delays);
    EXPECT_EQ(prompt.losses, late.losses);
    EXPECT_EQ(prompt.norms, late.norms);
    for (std::size_t i = 0; i < prompt.parameters.size(); ++i) {
      EXPECT_TRUE(prompt.gradients[i].equal(late.gradients[i])) << prompt.names[i];
      EXPECT_TRUE(prompt.parameters[i].equal(late.parameters[i])) << prompt.names[i];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Zero, FsdpDelays, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Zero3" : "Zero2"; });

}  // namespace
}  // namespace llama

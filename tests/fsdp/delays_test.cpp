// One rank is late at some stage of a step: nobody may compute with what is not there yet. With
// TESSERA_TEST_DELAY=100 in the environment a delay is 100 ms.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "fsdp/training.h"
#include "tessera/fsdp/collectives.h"

namespace tessera::fsdp {
namespace {

using testing::local_loss;
using testing::shard;
using testing::SmallModel;

enum class Stage { kNone, kAllGather, kReduceScatter, kForward, kBackward, kStep };

void be_late() {
  const char* milliseconds = std::getenv("TESSERA_TEST_DELAY");
  std::this_thread::sleep_for(
      std::chrono::milliseconds(milliseconds == nullptr ? 5 : std::atoi(milliseconds)));
}

void delay(SmallModel& model, Stage stage) {
  if (stage == Stage::kAllGather) {
    set_custom_all_gather(model, [](auto& group, const auto& output, const auto& input) {
      be_late();
      return group.all_gather(output, input);
    });
  } else if (stage == Stage::kReduceScatter) {
    set_custom_reduce_scatter(model, [](auto& group, const auto& output, const auto& input) {
      be_late();
      return group.reduce_scatter(output, input, ReduceOp::kSum);
    });
  } else if (stage == Stage::kForward || stage == Stage::kBackward) {
    for (const auto& block : model.blocks) {
      block->up->add_forward_hook([stage](nn::ModuleBase&, nn::TensorList outputs) {
        if (stage == Stage::kForward) be_late();
        outputs[0]->register_hook([stage](const at::Tensor&) {
          if (stage == Stage::kBackward) be_late();
        });
      });
    }
  }
}

/// The whole parameters after two steps in which `late_rank` is late.
std::vector<at::Tensor> train(Stage stage, int late_rank, const Options& options) {
  std::vector<at::Tensor> result;
  RunRanks(3, [&](Rank& rank) {
    SmallModel model(7, 9, 3, 2);
    testing::fill(model);
    shard(model, rank.mesh({3}, {"dp"}), options);
    const bool late = rank.rank() == late_rank;
    if (late) delay(model, stage);
    for (int step = 0; step < 2; ++step) {
      local_loss(model, rank, step).backward();
      if (late && stage == Stage::kStep) be_late();
      testing::descend(model, 0.1);
    }
    for (const auto& [name, slot] : model.named_slots()) {
      const at::Tensor value = testing::whole(slot->persistent());
      if (rank.rank() == 0) result.push_back(value);
    }
  });
  return result;
}

class Delays : public ::testing::TestWithParam<Stage> {};

TEST_P(Delays, ChangeNothing) {
  for (const bool zero3 : {true, false}) {
    Options options{.reshard_after_forward = zero3};
    if (zero3) options.offload_policy = OffloadPolicy{};
    const std::vector<at::Tensor> expected = train(Stage::kNone, 0, options);
    for (const int late_rank : {0, 2}) {
      const std::vector<at::Tensor> values = train(GetParam(), late_rank, options);
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(values[i].equal(expected[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Delays,
                         ::testing::Values(Stage::kAllGather, Stage::kReduceScatter,
                                           Stage::kForward, Stage::kBackward, Stage::kStep));

}  // namespace
}  // namespace tessera::fsdp

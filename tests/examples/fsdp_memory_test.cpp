// ZeRO-2 against replicated data parallelism: what each rank keeps of gradients and the optimizer.
#include <gtest/gtest.h>

#include "examples/llama/parallelize.h"
#include "examples/llama_run.h"
#include "testing/ranks.h"

namespace llama {
namespace {

using tessera::local_tensor;
using tessera::testing::Rank;
using tessera::testing::RunRanks;

std::int64_t local_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(local_tensor(tensor).nbytes());
}

/// Bytes of gradients and of AdamW's moments on this rank, after a step.
std::int64_t bytes_of_step(Llama& model, const Part& part) {
  const std::vector<tessera::nn::SlotPtr> slots = tessera::optim::slots_of(model);
  tessera::optim::AdamW optimizer(slots, {});
  accumulate(model, kOddShape, part, 0);
  std::int64_t bytes = 0;
  for (const auto& slot : slots) bytes += local_bytes(slot->persistent().grad());
  optimizer.step();
  for (const auto& state : optimizer.state()) {
    if (state.name != "step") bytes += local_bytes(state.tensor);
  }
  return bytes;
}

std::int64_t bytes_on(Rank& rank, std::int64_t replicas, std::int64_t dp) {
  const auto model = make_llama(kOddShape);
  parallelize(*model, rank.mesh({replicas, dp, 1}, {"dp_replicate", "dp", "tp"}),
              {.fsdp = {.reshard_after_forward = false}});
  return bytes_of_step(*model, {.part = rank.rank(), .parts = rank.size()});
}

TEST(FsdpMemory, OfZero2IsAQuarterOfThatOfFourReplicas) {
  RunRanks(4, [](Rank& rank) {
    const std::int64_t replicated = bytes_on(rank, 4, 1);
    const std::int64_t sharded = bytes_on(rank, 1, 4);
    const ParameterCount count = count_parameters(parse_config(kOddShape.config, "test"));
    EXPECT_EQ(replicated, count.total * 3 * 4);
    // A quarter and at most a row of each parameter: none here has more than 61 rows.
    EXPECT_LT(static_cast<double>(sharded), 0.27 * static_cast<double>(replicated));
  });
}

}  // namespace
}  // namespace llama

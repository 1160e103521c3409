// What a rank holds: under ZeRO-2 beside replicated data parallelism, of gradients and the
// optimizer; and with a unit for the embedding and one for the head beside one for both.
#include <gtest/gtest.h>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/memory/memory_scope.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::Rank;
using testing::RunRanks;

std::int64_t local_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(local_tensor(tensor).nbytes());
}

/// Bytes of gradients and of AdamW's moments on this rank, after a step.
std::int64_t bytes_of_step(Llama& model, const Part& part) {
  const std::vector<nn::SlotPtr> slots = optim::slots_of(model);
  optim::AdamW optimizer(slots, {});
  accumulate(model, kOddShape, part, 0);
  std::int64_t bytes = 0;
  for (const auto& slot : slots) {
    bytes += local_bytes(slot->persistent().grad());
  }
  optimizer.step();
  for (const auto& state : optimizer.state()) {
    if (state.name != "step") {
      bytes += local_bytes(state.tensor);
    }
  }
  return bytes;
}

std::int64_t bytes_on(Rank& rank, std::int64_t replicas, std::int64_t dp) {
  const auto model = make_llama(kOddShape);
  parallelize(*model, rank.mesh({replicas, dp, 1}, {"dp_replicate", "dp", "tp"}),
              {.fsdp = {.reshard_after_forward = false}});
  return bytes_of_step(*model, {.part = rank.rank(), .parts = rank.size()});
}

TEST(FsdpMemory, InZero2IsAQuarterOfThatOfFourReplicas) {
  RunRanks(4, [](Rank& rank) {
    const std::int64_t replicated = bytes_on(rank, 4, 1);
    const std::int64_t sharded = bytes_on(rank, 1, 4);
    const ParameterCount count = count_parameters(parse_config(kOddShape.config, "test"));
    EXPECT_EQ(replicated, count.total * 3 * 4);
    // A quarter and at most a row of each parameter: none here has more than 61 rows.
    EXPECT_LT(static_cast<double>(sharded), 0.27 * static_cast<double>(replicated));
  });
}

/// Two thirds of it are the embedding and the head.
constexpr Shape kWideShape{
    R"({"vocab_size": 1009, "hidden_size": 60, "intermediate_size": 120, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.1})",
    4, 9};

/// The most that a step allocates on this rank beside what it began with.
std::int64_t peak_of_step(Rank& rank, bool with_units) {
  const auto model = make_llama(kWideShape);
  const DeviceMesh mesh = rank.mesh({4, 1}, {"dp", "tp"});
  if (with_units) {
    parallelize(*model, mesh, {});
  } else {
    for (nn::ModuleBase* block : model->blocks()) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(*model, mesh["dp"]);
  }
  const Part part{.part = rank.rank(), .parts = rank.size()};
  accumulate(*model, kWideShape, part, 0);  // the first step is not as the others
  const testing::MemoryScope memory;
  accumulate(*model, kWideShape, part, 1);
  return memory.peak();
}

TEST(FsdpMemory, ForEmbeddingAndHeadIsNotHeldAtOnce) {
  RunRanks(4, [](Rank& rank) {
    const std::int64_t together = peak_of_step(rank, false);
    const std::int64_t apart = peak_of_step(rank, true);
    const std::int64_t table = 1009 * 60 * 4;
    EXPECT_LT(apart, together - table) << together << " bytes together, a table has " << table;
  });
}

}  // namespace
}  // namespace tessera::models

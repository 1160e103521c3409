// A Llama with fewer key-value heads than tensor-parallel ranks against itself on one rank, in
// fp64.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <memory>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::full_tensor;
using testing::Rank;
using testing::RunRanks;

constexpr Shape kTwoKvHeads{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true})",
    2, 9};

std::shared_ptr<Llama> make_double() {
  const auto model = make_llama(kTwoKvHeads);
  model->to(c10::kDouble);
  return model;
}

TEST(FewKeyValueHeads, HaveTheInitialWeightsOfOneRank) {
  const auto alone = make_llama(kTwoKvHeads);
  RunRanks(4, [&](Rank& rank) {
    const auto model = testing::made_on_meta<Llama>(alone->config(), kTwoKvHeads.sequence);
    parallelize(*model, rank.mesh({1, 4}, {"dp", "tp"}), {});
    nn::to_empty(*model, c10::kCPU);
    nn::init_weights(*model, 7);
    const auto expected = alone->named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model->named_slots()) {
      EXPECT_TRUE(at::equal(full_tensor(slot->persistent()), expected[i++].second->get().detach()))
          << name;
    }
  });
}

/// Sizes of the mesh ("dp", "tp"), and what is kept for backward.
struct KvMesh {
  std::int64_t dp, tp;
  bool sequence_parallel;
  ActivationMemory activations = ActivationMemory::kAll;
};

class FewKeyValueHeadsOn : public ::testing::TestWithParam<KvMesh> {};

TEST_P(FewKeyValueHeadsOn, HaveTheGradientsOfOneRank) {
  const KvMesh& c = GetParam();
  const auto alone = make_double();
  const double loss = accumulate(*alone, kTwoKvHeads, {}, 0);
  RunRanks(static_cast<int>(c.dp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({c.dp, c.tp}, {"dp", "tp"});
    const auto model = make_double();
    parallelize(*model, mesh,
                {.sequence_parallel = c.sequence_parallel, .activations = c.activations});
    const StrictScope strict;
    const Part part{.part = mesh["dp"].local_rank(), .parts = c.dp};
    at::Tensor mean = at::full({1}, accumulate(*model, kTwoKvHeads, part, 0), c10::kDouble);
    if (c.dp > 1) {
      mesh["dp"].group().all_reduce(mean, ReduceOp::kAvg)->wait();
    }
    EXPECT_NEAR(mean.item<double>(), loss, 1e-10);
    testing::expect_gradients(*model, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, FewKeyValueHeadsOn,
                         ::testing::Values(KvMesh{1, 4, true}, KvMesh{1, 8, false},
                                           KvMesh{2, 4, true, ActivationMemory::kInputs}));

}  // namespace
}  // namespace tessera::models

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/training/small_model.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::fsdp {
namespace {

using testing::full_tensor;
using testing::SmallModel;

constexpr std::int64_t kRows = 12;

/// One rank's training step in bf16 computation with fp32 masters, written out.
std::vector<at::Tensor> reference_gradients(const at::Tensor& batch) {
  SmallModel masters(5, 7, 3);
  SmallModel compute(5, 7, 3);
  testing::fill(masters);
  const auto from = masters.named_slots();
  const auto to = compute.named_slots();
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i].second->set(from[i].second->get().detach().to(at::kBFloat16).requires_grad_());
  }
  testing::loss_of(compute, batch.to(at::kBFloat16), 0, kRows).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : to) {
    gradients.push_back(slot->get().grad().to(at::kFloat));
  }
  return gradients;
}

void shard(SmallModel& model, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh, {.mp_policy = policy});
  }
  fully_shard(model, mesh, {.mp_policy = policy});
}

class MixedPrecision : public ::testing::TestWithParam<int> {};

TEST_P(MixedPrecision, ComputesInBfloat16AndKeepsMastersInFp32) {
  const at::Tensor batch = testing::uniform_values({kRows, 5}, 3);
  const std::vector<at::Tensor> expected = reference_gradients(batch);
  RunRanks(GetParam(), [&](Rank& rank) {
    testing::Filled<SmallModel> model(5, 7, 3);
    shard(model, rank.mesh({rank.size()}, {"dp"}),
          {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    const std::int64_t rows = kRows / rank.size();
    const at::Tensor loss = testing::loss_of(model, batch, rank.rank() * rows, rows);
    EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
    loss.backward();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      const at::Tensor& parameter = slot->persistent();
      EXPECT_EQ(parameter.scalar_type(), at::kFloat) << name;
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat) << name;
      // bf16 has 8 bits; ranks round their parts of the batch.
      EXPECT_TRUE(full_tensor(parameter.grad()).allclose(expected[i++], 3e-2, 3e-3)) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MixedPrecision, ::testing::Values(1, 2, 3));

TEST(MixedPrecision, ReducesInFp32) {
  // 1 + 2^-9 is not a bf16 number, so a reduction in bf16 would lose it.
  RunRanks(2, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(1, 1, {.bias = false});
    fully_shard(linear, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const at::Tensor x = at::ones({1, 1}).mul(rank.rank() == 0 ? 2.0 : 1.0 / 256);
    linear(x).sum().backward();
    const at::Tensor gradient = full_tensor(linear.slot("weight")->persistent().grad());
    EXPECT_EQ(gradient.item<float>(), 1.0f + 1.0f / 512);
  });
}

/// What a step of two micro-batches gives on two replicas of two ranks, of which one has a large
/// gradient and the others have small ones.
float gradient_over_replicas(Rank& rank, at::ScalarType reduce_dtype, bool zero3) {
  testing::Filled<nn::Linear> linear(1, 1, {.bias = false});
  fully_shard(linear, rank.mesh({2, 2}, {"dp_replicate", "dp"}),
              {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype},
               .reshard_after_forward = zero3});
  const at::Tensor x = at::ones({1, 1}).mul(rank.rank() == 0 ? 2.0 : 1.0 / 256);
  linear(x).sum().backward();
  linear(x).sum().backward();
  return full_tensor(linear.slot("weight")->persistent().grad()).item<float>();
}

TEST(MixedPrecision, ReducesInTheTypeOfThePolicyOverReplicasAndMicroBatches) {
  RunRanks(4, [](Rank& rank) {
    for (const bool zero3 : {true, false}) {
      // A mean of four, twice. In bf16 each sum loses the small terms: 2 + 2^-7 is rounded to 2.
      EXPECT_EQ(gradient_over_replicas(rank, at::kFloat, zero3), 2 * (2 + 3.0F / 256) / 4);
      EXPECT_EQ(gradient_over_replicas(rank, at::kBFloat16, zero3), 2 * 2.0F / 4);
    }
  });
}

TEST(MixedPrecision, CastsResultsToTheOutputType) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(3, 2);
    fully_shard(linear, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    EXPECT_EQ(linear(testing::uniform_values({4, 3}, 0)).scalar_type(), at::kFloat);
  });
}

/// Looks at what its forward is given.
class Looking : public nn::Module<Looking> {
 public:
  Looking() {
    weight = register_slot("weight", at::ones({3}));
    table = register_buffer_slot("table", {3});
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
    seen = {x.scalar_type(), ids.scalar_type(), weight->scalar_type(), table->scalar_type()};
    return x.to(at::kFloat) * *weight;
  }

  nn::Parameter weight, table;
  std::vector<at::ScalarType> seen;
};

TEST(MixedPrecision, CastsFloatingInputsIfAskedAndNothingElse) {
  RunRanks(2, [](Rank& rank) {
    for (const bool cast : {true, false}) {
      Looking module;
      module.table->zero_();
      fully_shard(module, rank.mesh({2}, {"dp"}),
                  {.mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = cast}});
      module(at::ones({3}), at::ones({3}, at::kLong));
      EXPECT_EQ(module.seen, (std::vector<at::ScalarType>{cast ? at::kBFloat16 : at::kFloat,
                                                          at::kLong, at::kBFloat16, at::kFloat}));
    }
  });
}

TEST(MixedPrecision, ReturnsToTheTypeOfTheInput) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(3, 2);
    fully_shard(linear, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kFloat, .restore_input_dtype = true}});
    EXPECT_EQ(linear(testing::uniform_values({4, 3}, 0).to(at::kBFloat16)).scalar_type(),
              at::kBFloat16);
    EXPECT_EQ(linear(testing::uniform_values({4, 3}, 0)).scalar_type(), at::kFloat);
  });
}

}  // namespace
}  // namespace tessera::fsdp

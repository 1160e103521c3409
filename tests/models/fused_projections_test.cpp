// A Llama with one product for queries, keys and values and one for gate and up, against the one
// with separate products.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::full_tensor;
using testing::Rank;
using testing::RunRanks;

/// Grouped heads, and a width that no number of ranks divides.
constexpr Shape kGrouped{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true})",
    4, 9};
/// As many key and value heads as heads, with biases everywhere.
constexpr Shape kEqual{
    R"({"vocab_size": 61, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2,
        "attention_bias": true, "mlp_bias": true})",
    4, 9};
/// Norms of queries and keys between the product and the positions.
constexpr Shape kNormed{
    R"({"model_type": "qwen3", "vocab_size": 61, "hidden_size": 40, "intermediate_size": 37,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
        "initializer_range": 0.2})",
    4, 9};

LlamaConfig config_of(const Shape& shape, bool fused) {
  LlamaConfig config = parse_config(shape.config, "test");
  config.fused_projections = fused;
  return config;
}

std::shared_ptr<Llama> initialised(const Shape& shape, bool fused) {
  auto model = std::make_shared<Llama>(config_of(shape, fused), shape.sequence);
  nn::init_weights(*model, 7);
  return model;
}

using Values = std::map<std::string, at::Tensor>;

/// What files have, from the whole parameters or their gradients.
Values stored(const Llama& model, bool gradients) {
  Values values;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    const at::Tensor whole = full_tensor(gradients ? tensor.grad() : tensor.detach());
    if (!slot->stored_parts()) {
      values[name] = whole;
      continue;
    }
    for (const nn::NamedRows& part : nn::rows_of_parts(name, *slot->stored_parts())) {
      std::vector<at::Tensor> rows;
      part.rows.visit(0, whole.size(0), [&](auto, std::int64_t from, std::int64_t count) {
        rows.push_back(whole.narrow(0, from, count));
      });
      values[part.name] = at::cat(rows);
    }
  }
  return values;
}

void expect_equal(const Values& found, const Values& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(at::equal(found.at(name), value)) << name;
  }
}

/// Sizes of the mesh ("dp", "tp").
using Mesh = std::pair<std::int64_t, std::int64_t>;

class FusedProjectionsOn : public ::testing::TestWithParam<std::tuple<const Shape*, Mesh>> {
 protected:
  const Shape& shape() const { return *std::get<0>(GetParam()); }
  std::int64_t dp() const { return std::get<1>(GetParam()).first; }
  std::int64_t tp() const { return std::get<1>(GetParam()).second; }
};

TEST_P(FusedProjectionsOn, BeginWithTheValuesOfSeparateOnes) {
  const Values expected = stored(*initialised(shape(), false), /*gradients=*/false);
  RunRanks(static_cast<int>(dp() * tp()), [&](Rank& rank) {
    const auto model = testing::made_on_meta<Llama>(config_of(shape(), true), shape().sequence);
    parallelize(*model, rank.mesh({dp(), tp()}, {"dp", "tp"}), {});
    nn::to_empty(*model, c10::kCPU);
    nn::init_weights(*model, 7);
    expect_equal(stored(*model, /*gradients=*/false), expected);
  });
}

TEST_P(FusedProjectionsOn, HaveTheGradientsOfSeparateOnes) {
  const auto alone = initialised(shape(), false);
  alone->to(c10::kDouble);
  const double loss = accumulate(*alone, shape(), {}, 0);
  const Values expected = stored(*alone, /*gradients=*/true);
  RunRanks(static_cast<int>(dp() * tp()), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({dp(), tp()}, {"dp", "tp"});
    const auto model = initialised(shape(), true);
    model->to(c10::kDouble);
    parallelize(*model, mesh, {});
    const StrictScope strict;
    const Part part{.part = mesh["dp"].local_rank(), .parts = dp()};
    at::Tensor mean = at::full({1}, accumulate(*model, shape(), part, 0), c10::kDouble);
    if (dp() > 1) {
      mesh["dp"].group().all_reduce(mean, ReduceOp::kAvg)->wait();
    }
    EXPECT_NEAR(mean.item<double>(), loss, 1e-10);
    const Values found = stored(*model, /*gradients=*/true);
    for (const auto& [name, gradient] : expected) {
      EXPECT_TRUE(found.at(name).allclose(gradient, 1e-10, 1e-10)) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, FusedProjectionsOn,
                         ::testing::Combine(::testing::Values(&kGrouped, &kEqual, &kNormed),
                                            ::testing::Values(Mesh{1, 1}, Mesh{2, 1}, Mesh{1, 2},
                                                              Mesh{2, 2}, Mesh{1, 4})));

TEST(FusedProjections, TrainInTheNumbersOfSeparateOnes) {
  for (const Shape* shape : {&kGrouped, &kEqual}) {
    const Outcome apart = train(*initialised(*shape, false), *shape);
    const Outcome fused = train(*initialised(*shape, true), *shape);
    for (std::size_t step = 0; step < apart.losses.size(); ++step) {
      EXPECT_NEAR(fused.losses[step], apart.losses[step], 1e-5) << step;
    }
  }
}

TEST(FusedProjections, RefuseRanksThatShareAHead) {
  EXPECT_ERROR(check_tensor_parallel(config_of(kGrouped, true), 8), "num_key_value_heads 4",
               "fused projections");
  check_tensor_parallel(config_of(kGrouped, false), 8);
}

}  // namespace
}  // namespace tessera::models

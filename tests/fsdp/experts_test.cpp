// Mixtures of experts on meshes ("dp", "ep"): losses, gradients and weights equal those of one
// rank.

#include "tessera/nn/experts.h"

#include <array>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "testing/distributed.h"

namespace tessera::fsdp::experts {
namespace {

constexpr std::int64_t kDim = 16, kRows = 24;

/// Two mixtures, each with a residual connection.
struct Network : nn::Module<Network> {
  explicit Network(const nn::ExpertsOptions& options)
      : first(*this, "first", options), second(*this, "second", options) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = input(x);
    const at::Tensor between = inner + first(inner);
    return between + second(between);
  }
  nn::Child<nn::Linear> input{*this, "input", kDim, kDim};
  nn::Child<nn::MixtureOfExperts> first, second;
};

struct Case {
  nn::ExpertsOptions options{.hidden = kDim, .inner = 12, .experts = 8, .init_std = 0.3};
  int accumulation = 1;
  bool recompute = false;
  bool replicated = false;  ///< whether the outer dimension replicates (HSDP)
  std::int64_t lora = 0;    ///< rank of the experts' adapters
  double router_shift = 0;  ///< added to the first column of the router's weight
};

/// What a training run computes, the same on every rank.
struct Curve {
  std::vector<double> numbers;
  std::vector<at::Tensor> weights;
};

/// The meshes of the experts and of all other parameters.
struct Meshes {
  DeviceMesh experts, all, ep;
};

std::shared_ptr<Network> make_network(const Case& test, const Meshes* meshes) {
  auto network = [&] {
    const nn::MetaDevice meta;
    return std::make_shared<Network>(test.options);
  }();
  if (test.lora > 0) {
    nn::apply_lora(*network, {.rank = test.lora, .alpha = 6, .targets = {"**.experts.*"}});
  }
  if (meshes != nullptr) {
    nn::apply_expert_parallel(*network, meshes->ep);
  }
  if (test.recompute) {
    nn::apply_activation_checkpointing(*network, nn::of_class<nn::MixtureOfExperts>());
  }
  if (meshes != nullptr) {
    Options options;
    options.parameter_mesh = [mesh = meshes->experts](const std::string& name, const at::Tensor&) {
      return name.find("experts.") != std::string::npos ? std::optional(mesh) : std::nullopt;
    };
    fully_shard(*network->first, meshes->all, options);
    fully_shard(*network->second, meshes->all, options);
    fully_shard(*network, meshes->all, options);
  }
  nn::to_empty(*network, at::kCPU);
  nn::init_weights(*network, /*seed=*/7);
  return network;
}

at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh) {
  at::Tensor sum = value.detach().clone();
  if (mesh) {
    mesh.group_of_all_ranks().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  return sum / (mesh ? mesh.size() : 1);
}

Curve train(const Case& test, const Meshes* meshes, std::int64_t index, std::int64_t count) {
  const std::shared_ptr<Network> network = make_network(test, meshes);
  const DeviceMesh all = meshes != nullptr ? meshes->all : DeviceMesh();
  optim::AdamW optimizer(*network, {.lr = 1e-2});
  Curve curve;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < test.accumulation; ++micro) {
      const at::Tensor x = testing::uniform_values({kRows, kDim}, 10 * step + micro);
      const std::int64_t rows = kRows / count;
      const at::Tensor own = x.narrow(0, index * rows, rows);
      const at::Tensor loss = ((*network)(own)-own.flip(1)).square().mean();
      const nn::RouterLosses router = nn::take_router_losses(*network, all);
      ((loss + 0.1 * router.load_balancing + 0.01 * router.z) / test.accumulation).backward();
      for (const at::Tensor& value : {loss, router.load_balancing, router.z}) {
        curve.numbers.push_back(mean_over(value, all).item<double>());
      }
      curve.numbers.insert(curve.numbers.end(), router.largest_over_mean.begin(),
                           router.largest_over_mean.end());
    }
    curve.numbers.push_back(optim::clip_grad_norm_(optimizer.parameters(), 1.0).item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  if (test.lora > 0) {
    const c10::NoGradGuard no_grad;
    network->eval();
    const at::Tensor x = testing::uniform_values({5, kDim}, 1), adapted = (*network)(x);
    nn::merge_lora(*network);
    EXPECT_TRUE((*network)(x).allclose(adapted, 1e-4, 1e-5));
  }
  for (const auto& [name, slot] : network->named_slots()) {
    const at::Tensor weight = slot->persistent();
    curve.weights.push_back(is_distributed(weight) ? DistributedTensor(weight).full_tensor()
                                                   : weight);
  }
  return curve;
}

void expect_equal(const Curve& curve, const Curve& alone) {
  ASSERT_EQ(curve.numbers.size(), alone.numbers.size());
  for (std::size_t i = 0; i < alone.numbers.size(); ++i) {
    EXPECT_NEAR(curve.numbers[i], alone.numbers[i], 2e-6 * std::abs(alone.numbers[i]) + 1e-7) << i;
  }
  ASSERT_EQ(curve.weights.size(), alone.weights.size());
  for (std::size_t i = 0; i < alone.weights.size(); ++i) {
    EXPECT_TRUE(curve.weights[i].detach().allclose(alone.weights[i].detach(), 1e-4, 2e-5)) << i;
  }
}

void expect_one_rank(const Case& test, std::vector<std::int64_t> sizes) {
  SCOPED_TRACE(::testing::PrintToString(sizes) + " " + std::to_string(test.options.experts));
  const Curve alone = train(test, nullptr, 0, 1);
  RunOnMesh(sizes, {"dp", "ep"}, [&](Rank& rank, const DeviceMesh& mesh) {
    const Meshes meshes{mesh["dp"], mesh.flatten("all"), mesh["ep"]};
    expect_equal(train(test, &meshes, rank.rank(), rank.size()), alone);
  });
}

TEST(Experts, TrainsLikeOneRank) {
  for (const std::int64_t experts : {8, 6}) {
    Case test;
    test.options.experts = experts;
    for (const auto& sizes :
         std::vector<std::vector<std::int64_t>>{{1, 2}, {2, 1}, {2, 2}, {1, 4}, {4, 1}, {3, 2}}) {
      expect_one_rank(test, sizes);
    }
  }
}

TEST(Experts, TrainsAdaptersLikeOneRank) {
  Case test;
  test.lora = 3;
  expect_one_rank(test, {2, 2});
  test.options.experts = 6;
  expect_one_rank(test, {1, 4});
}

}  // namespace
}  // namespace tessera::fsdp::experts

// A module that declares its tensor-parallel plan: attention heads with QK-norm, and a custom style
// for a parameter with one value per head.
//   tessera-run --nproc 4 -- build/bin/tutorial_10_declared_plan

#include <ATen/ops/arange.h>

#include <iostream>

#include "expect_gradients.h"
#include "tessera/comm/world.h"
#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kHeads = 4, kSize = 3, kDim = kHeads * kSize;

/// Scales each head of a (tokens, heads, size) tensor by its own factor.
struct Gain : nn::Module<Gain> {
  Gain() { scale = register_slot("scale", {kHeads, 1}); }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(scale, nn::init::uniform(0.5, 1.5));
  }
  nn::Parameter scale;
};

// [headwise]
/// A style that splits the parameters by heads. Dimension 1 of the input is the heads.
class HeadwiseParallel final : public tensor_parallel::ParallelStyle {
  std::string name() const override { return "headwise_parallel"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    return {{module.slot("scale"), Shard{0}}};
  }
  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh](nn::ModuleBase& self, nn::TensorList x) {
      *x[0] = tensor_parallel::prepare_input(self, *x[0], mesh, Replicate{}, Shard{1});
    });
  }
};
// [headwise]

/// The projections of an attention layer without the attention product: (tokens, dim) -> (tokens,
/// dim). The class declares its tensor-parallel plan.
struct Heads : nn::Module<Heads>, tensor_parallel::DeclaresPlan {
  Heads() {
    q_proj = register_module("q_proj", std::make_shared<nn::Linear>(kDim, kDim));
    q_norm = register_module("q_norm", std::make_shared<nn::RMSNorm>(kSize));
    gain = register_module("gain", std::make_shared<Gain>());
    o_proj = register_module("o_proj", std::make_shared<nn::Linear>(kDim, kDim));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor heads = (*q_proj)(x).view({x.size(0), -1, kSize});
    return x + (*o_proj)((*gain)((*q_norm)(heads)).flatten(1));
  }
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions&) const override {
    using namespace tensor_parallel;
    return {{"q_proj", colwise_parallel({.heads = kHeads})},
            {"q_norm", sequence_parallel({.sequence_dim = 1})},
            {"gain", std::make_shared<HeadwiseParallel>()},
            {"o_proj", rowwise_parallel({.heads = kHeads})}};
  }
  std::shared_ptr<nn::Linear> q_proj, o_proj;
  std::shared_ptr<nn::RMSNorm> q_norm;
  std::shared_ptr<Gain> gain;
};

struct Model : nn::Module<Model> {
  Model() {
    layers = register_module("layers", std::make_shared<nn::ModuleList>());
    layers->push_back(std::make_shared<Heads>());
    layers->push_back(std::make_shared<Heads>());
  }
  at::Tensor forward(const at::Tensor& x) {
    return (*layers->at<Heads>(1))((*layers->at<Heads>(0))(x));
  }
  std::shared_ptr<nn::ModuleList> layers;
};

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"tp"});
  Model whole, split;
  nn::init_weights(whole, /*seed=*/0);
  nn::init_weights(split, /*seed=*/0);
  tensor_parallel::parallelize_module(split, mesh);

  const at::Tensor x = at::arange(5 * kDim, at::kFloat).view({5, kDim}) / 60;
  whole(x).square().sum().backward();
  split(x).square().sum().backward();
  expect_gradients(split, whole);
  if (world->rank() == 0) {
    std::cout << "every gradient is as one rank computes it" << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}

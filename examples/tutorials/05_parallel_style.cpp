// A custom parallel style: splits a custom module that stands between two library modules.
//   tessera-run --nproc 4 -- build/bin/tutorial_05_parallel_style

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

/// y = x * scale, with one factor per feature.
struct Scale : nn::Module<Scale> {
  explicit Scale(std::int64_t features) { scale = register_slot("scale", {features}); }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(scale, nn::init::uniform(0.5, 1.5));
  }
  nn::Parameter scale;
};

/// The parallel style of a Scale: each rank has the factors of its own features.
class FeaturewiseParallel final : public tensor_parallel::ParallelStyle {
 public:
  std::string name() const override { return "featurewise_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    TESSERA_CHECK(dynamic_cast<const Scale*>(&module) != nullptr, name(),
                  " is for a Scale, but was asked for a ", module.name());
    return {{module.slot("scale"), Shard{0}}};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    // Redistributes the input to Shard(-1). The output of a column-wise Linear already has this
    // placement. A plain input is treated as replicated, and each rank takes its features of it.
    module.add_forward_pre_hook([mesh](nn::ModuleBase& self, nn::TensorList inputs) {
      *inputs[0] = tensor_parallel::prepare_input(self, *inputs[0], mesh, Replicate{}, Shard{-1});
    });
  }
};

struct Model : nn::Module<Model> {
  Model() {
    up = register_module("up", std::make_shared<nn::Linear>(6, 11));
    scale = register_module("scale", std::make_shared<Scale>(11));
    down = register_module("down", std::make_shared<nn::Linear>(11, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)((*scale)((*up)(x))); }
  std::shared_ptr<nn::Linear> up, down;
  std::shared_ptr<Scale> scale;
};

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"tp"});

  Model whole;
  nn::init_weights(whole, /*seed=*/0);
  Model split;
  nn::init_weights(split, /*seed=*/0);
  using namespace tensor_parallel;
  parallelize_module(split, mesh,
                     {{"up", colwise_parallel()},
                      {"scale", std::make_shared<FeaturewiseParallel>()},
                      {"down", rowwise_parallel()}});

  const at::Tensor x = at::arange(3 * 6, c10::kFloat).view({3, 6}) / 18;
  // Reference: the same computation on one rank.
  whole(x).square().sum().backward();
  split(x).square().sum().backward();
  const at::Tensor result = DistributedTensor(split(x)).full_tensor();
  TESSERA_CHECK(at::allclose(result, whole(x), 1e-5, 1e-6), "the result is wrong");
  const DistributedTensor grad(split.scale->scale->grad());
  TESSERA_CHECK(at::allclose(grad.full_tensor(), whole.scale->scale->grad(), 1e-5, 1e-6),
                "the gradient is wrong");

  if (world->rank() == 0) {
    std::cout << "the scale's gradient is " << to_string(grad.placements()) << ", this rank has "
              << grad.to_local().numel() << " of " << grad.tensor().numel() << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}

// A parallel style of your own: how a module of yours is split between two of the library's.
//   tessera-run --nproc 4 -- build/bin/tutorial_05_parallel_style

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

/// y = x * scale, with a factor for each feature.
struct Scale : nn::Module<Scale> {
  explicit Scale(std::int64_t size) : features(size) { scale = register_slot("scale", {size}); }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(scale, nn::init::uniform(0.5, 1.5));
  }
  std::int64_t features;
  nn::Parameter scale;
};

// [style]
/// A Scale between a column-wise and a row-wise Linear: each rank has the factors of its features.
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
    // What comes is plain: this rank's features. Their sum over the ranks need not divide.
    module.add_forward_pre_hook([mesh](nn::ModuleBase& self, nn::TensorList inputs) {
      std::vector<std::int64_t> sizes = inputs[0]->sizes().vec();
      sizes.back() = static_cast<const Scale&>(self).features;
      *inputs[0] = DistributedTensor::from_local(*inputs[0], mesh, {Shard{-1}}, sizes);
    });
    module.add_forward_hook([](nn::ModuleBase&, nn::TensorList outputs) {
      *outputs[0] = DistributedTensor(*outputs[0]).to_local();
    });
  }
};
// [style]

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

int main() {
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
  // The same computation on one rank is the test of the split one.
  whole(x).square().sum().backward();
  split(x).square().sum().backward();
  TESSERA_CHECK(at::allclose(split(x), whole(x), 1e-5, 1e-6), "the result is wrong");
  const DistributedTensor grad(split.scale->scale->grad());
  TESSERA_CHECK(at::allclose(grad.full_tensor(), whole.scale->scale->grad(), 1e-5, 1e-6),
                "the gradient is wrong");

  if (world->rank() == 0) {
    std::cout << "the scale's gradient is " << to_string(grad.placements()) << ", this rank has "
              << grad.to_local().numel() << " of " << grad.tensor().numel() << std::endl;
  }
}

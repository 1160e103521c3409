// A custom module, from its parameters to training on a mesh.
//   tessera-run --nproc 4 -- build/bin/tutorial_08_your_own_module

#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <iostream>

#include "expect_gradients.h"
#include "tessera/tessera.hpp"

using namespace tessera;

// [module]
/// Scales each head of a (batch, sequence, heads, head_dim) tensor by its own factor.
struct HeadScale : nn::Module<HeadScale> {
  explicit HeadScale(std::int64_t heads) { scale = register_slot("scale", {heads}); }
  at::Tensor forward(const at::Tensor& x) { return x * scale->unsqueeze(1); }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(scale, nn::init::uniform(0.5, 1.5));
  }
  nn::Parameter scale;
};
// [module]

/// Causal attention with normalized queries and keys. Input and output are (batch, sequence, dim).
struct Attention : nn::Module<Attention> {
  Attention(std::int64_t heads, std::int64_t size) : head_dim(size) {
    const std::int64_t dim = heads * head_dim;
    q_proj = register_module("q_proj", std::make_shared<nn::Linear>(dim, dim));
    k_proj = register_module("k_proj", std::make_shared<nn::Linear>(dim, dim));
    v_proj = register_module("v_proj", std::make_shared<nn::Linear>(dim, dim));
    q_norm = register_module("q_norm", std::make_shared<nn::RMSNorm>(head_dim));
    k_norm = register_module("k_norm", std::make_shared<nn::RMSNorm>(head_dim));
    q_scale = register_module("q_scale", std::make_shared<HeadScale>(heads));
    out_proj = register_module("out_proj", std::make_shared<nn::Linear>(dim, dim));
    dropout = register_module("dropout", std::make_shared<nn::Dropout>(0.1));
  }

  at::Tensor forward(const at::Tensor& x) {
    // Child modules are called with (*module)(x); module->forward(x) would skip the hooks.
    const at::Tensor q = (*q_scale)((*q_norm)(split((*q_proj)(x))));
    const at::Tensor k = (*k_norm)(split((*k_proj)(x)));
    const at::Tensor v = split((*v_proj)(x));
    const at::Tensor mixed = at::scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, /*is_causal=*/true);
    return (*dropout)((*out_proj)(mixed.transpose(1, 2).flatten(2)));
  }
  at::Tensor split(const at::Tensor& x) const {
    return x.unflatten(2, {-1, head_dim});  // x.size() is the global size on any mesh
  }

  std::int64_t head_dim;
  std::shared_ptr<nn::Linear> q_proj, k_proj, v_proj, out_proj;
  std::shared_ptr<nn::RMSNorm> q_norm, k_norm;
  std::shared_ptr<HeadScale> q_scale;
  std::shared_ptr<nn::Dropout> dropout;
};

/// Computes the loss inside forward, where a plain target can be combined with a distributed
/// output.
struct Model : nn::Module<Model> {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return at::mse_loss(attention(x), target);
  }
  nn::Child<Attention> attention{*this, "attention", /*heads=*/4, /*size=*/8};
};

// [own_style]
/// The parallel style of a HeadScale whose heads are split over the ranks: each rank has the
/// factors of its own heads.
class HeadwiseParallel final : public tensor_parallel::ParallelStyle {
 public:
  std::string name() const override { return "headwise_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    TESSERA_CHECK(dynamic_cast<const HeadScale*>(&module) != nullptr, name(),
                  " needs a HeadScale, but got a ", module.name());
    return {{module.slot("scale"), Shard{0}}};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    // Dimension 2 of the input is the heads. If the input is already split by heads, no data moves.
    module.add_forward_pre_hook([mesh](nn::ModuleBase& self, nn::TensorList inputs) {
      *inputs[0] = tensor_parallel::prepare_input(self, *inputs[0], mesh, Replicate{}, Shard{2});
    });
  }
};
// [own_style]

// [own_plan]
std::shared_ptr<Model> split_model(const DeviceMesh& mesh) {
  auto model = [] {
    const nn::MetaDevice meta;
    return std::make_shared<Model>();
  }();
  using namespace tensor_parallel;
  parallelize_module(*model, mesh["tp"],
                     {{"attention.[qkv]_proj", colwise_parallel({.heads = 4})},
                      {"attention.q_scale", std::make_shared<HeadwiseParallel>()},
                      {"attention.out_proj", rowwise_parallel({.heads = 4})}});
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);
  nn::init_weights(*model, /*seed=*/0);
  return model;
}
// [own_plan]

/// Compares the split model's loss and gradients with those of the same step on one rank.
void compare_with_one_rank(Model& model) {
  Model whole;
  nn::init_weights(whole, /*seed=*/0);
  // eval() turns dropout off. All ranks use the same sample, so FSDP's mean of the gradients equals
  // the gradient on one rank.
  whole.eval();
  model.eval();
  at::manual_seed(0);
  const at::Tensor x = at::randn({2, 6, 32}), target = at::randn({2, 6, 32});
  const at::Tensor expected = whole(x, target), loss = model(x, target);
  TESSERA_CHECK(std::abs(loss.item<float>() - expected.item<float>()) < 1e-5,
                "the split model's result differs from the whole model's result");
  expected.backward();
  loss.backward();
  expect_gradients(model, whole);
  model.train();
}

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});
  const std::shared_ptr<Model> model = split_model(mesh);
  optim::AdamW optimizer(*model, {.lr = 1e-2});
  compare_with_one_rank(*model);
  optimizer.zero_grad();

  at::manual_seed(mesh.local_rank("dp"));  // all ranks of a tp group draw the same samples
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor x = at::randn({16, 6, 32});
    const at::Tensor loss = (*model)(x, x.cumsum(1) / 6);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (world->rank() == 0) {
      std::cout << "step " << step << " loss " << loss.item<double>() << std::endl;
    }
  }
}

int main() {
  return comm::run_main(&run_rank);
}

// Custom FSDP: choosing which modules are FSDP units, how units are gathered, and a custom
// optimizer.
//   tessera-run --nproc 4 -- build/bin/tutorial_06_fsdp

#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

struct Mlp : nn::Module<Mlp> {
  Mlp() {
    up = register_module("up", std::make_shared<nn::Linear>(64, 250));
    down = register_module("down", std::make_shared<nn::Linear>(250, 64));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)(at::relu((*up)(x))); }
  std::shared_ptr<nn::Linear> up, down;
};

struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
};

/// The optimizer Lion (Chen et al. 2023) updates by the sign of an interpolated momentum. The
/// update is elementwise, so Lion works on any shards.
class Lion final : public optim::GroupedOptimizer<LionOptions> {
 public:
  Lion(const nn::ModuleBase& module, LionOptions options)
      : GroupedOptimizer({{optim::slots_of(module), options}}, {"exp_avg"},
                         /*counts_steps=*/false) {}

 private:
  void update_batch(const optim::Batch& batch, std::size_t group) override {
    const LionOptions& o = options(group);
    for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
      const at::Tensor& average = batch.states[0][i];
      const at::Tensor update = average.lerp(batch.gradients[i], 1 - o.beta1).sign_();
      batch.parameters[i].mul_(1 - lr(group) * o.weight_decay).sub_(update, lr(group));
      average.lerp_(batch.gradients[i], 1 - o.beta2);
    }
  }
};

/// Makes each module with many parameters an FSDP unit; parameters of all other modules belong to
/// the root unit. FSDP is applied to inner modules first.
void shard_large_modules(Mlp& model, const DeviceMesh& mesh) {
  const auto shard = [&](const std::string& fqn, nn::ModuleBase& module) {
    std::int64_t numel = 0;
    for (const auto& [name, slot] : module.slots()) {
      numel += slot->persistent().numel();
    }
    if (!fqn.empty() && numel >= 10'000) {
      fsdp::fully_shard(module, mesh, {.reshard_after_forward = true});
    }
    if (mesh.local_rank() == 0 && numel > 0) {
      std::cout << fqn << ": " << numel << " elements\n";
    }
  };
  nn::visit_modules(model, shard, {.children_first = true});
  fsdp::fully_shard(model, mesh);
}

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  const auto model = std::make_shared<Mlp>();
  nn::init_weights(*model, /*seed=*/0);

  shard_large_modules(*model, mesh);
  Lion optimizer(*model, {.lr = 1e-3});

  // Each rank trains on its own samples. FSDP averages the gradients.
  at::manual_seed(mesh.local_rank());
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor x = at::randn({32, 64});
    const at::Tensor loss = at::mse_loss((*model)(x), x.flip(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (world->rank() == 0) {
      std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
    }
  }
}

int main() {
  return comm::run_main(&run_rank);
}

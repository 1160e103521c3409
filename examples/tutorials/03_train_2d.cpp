// FSDP x tensor parallelism in one program: create a mesh, build the model on the meta device,
// split, initialize and train the model.
//   tessera-run --nproc 4 -- build/bin/tutorial_03_train_2d

// [readme]
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
  /// Computes the loss inside forward, where plain tensors such as `target` are treated as
  /// replicated.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return at::mse_loss((*down)(at::relu((*up)(x))), target);
  }
  std::shared_ptr<nn::Linear> up, down;
};

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});

  const auto model = [] {
    const nn::MetaDevice meta;
    return std::make_shared<Mlp>();
  }();
  using namespace tensor_parallel;
  parallelize_module(*model, mesh["tp"],
                     {{"up", colwise_parallel()}, {"down", rowwise_parallel()}});
  fsdp::fully_shard(*model, mesh["dp"]);
  nn::to_empty(*model, at::kCPU);        // allocates only this rank's shards
  nn::init_weights(*model, /*seed=*/0);  // bit-identical on every mesh
  optim::AdamW optimizer(*model, {.lr = 1e-2});

  at::manual_seed(mesh.local_rank("dp"));  // all ranks of a tp group draw the same samples
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor x = at::randn({32, 64});
    const at::Tensor loss = (*model)(x, x.flip(1));
    loss.backward();
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (world->rank() == 0) {
      std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
    }
  }
}

int main() {
  return comm::run_main(&run_rank);  // an error is printed as one line with the rank
}
// [readme]

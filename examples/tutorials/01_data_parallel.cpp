// Data parallelism: an unchanged torch::nn model, trained on several ranks. The last batch of an
// epoch has one row (sample), so all ranks but one have no sample of this batch.
//   tessera-run --nproc 2 -- build/bin/tutorial_01_data_parallel
//   torchrun --nproc-per-node 2 --no-python build/bin/tutorial_01_data_parallel
//   mpirun -np 2 build/bin/tutorial_01_data_parallel

#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sin.h>
#include <torch/nn/modules/linear.h>

#include <iostream>
#include <vector>

#include "tessera/tessera.hpp"

using namespace tessera;

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
  torch::nn::Linear up = register_module("up", torch::nn::Linear(8, 64));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(64, 1));
};

struct Batch {
  at::Tensor x, target;
};

/// Returns an epoch of 129 rows (samples) in batches of 64, 64 and 1 rows.
std::vector<Batch> epoch_of_batches() {
  const at::Tensor x = at::sin(at::arange(129 * 8, at::kFloat).square()).view({129, 8});
  std::vector<Batch> batches;
  for (const at::Tensor& rows : x.split(64)) {
    batches.push_back({rows, rows.square().sum(1, /*keepdim=*/true)});
  }
  return batches;
}

// [data_parallel]
void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = fsdp::world_mesh(world);
  at::manual_seed(0);  // the same initial weights on every rank
  const auto model = nn::adopt(std::make_shared<Net>());
  fsdp::replicate(*model, mesh);
  optim::Sgd optimizer(*model, {.lr = 0.05});

  for (int epoch = 1; epoch <= 5; ++epoch) {
    observe::MeanMetric mean;
    for (const Batch& batch : epoch_of_batches()) {
      // This rank's rows, as torch.chunk splits the batch: fewer rows on some ranks, or none.
      const at::Tensor x = distribute_tensor(batch.x, mesh, {Shard{0}}).to_local();
      const at::Tensor target = distribute_tensor(batch.target, mesh, {Shard{0}}).to_local();
      const at::Tensor y = (*model)(x);
      const at::Tensor loss = x.size(0) > 0 ? at::mse_loss(y, target) : y.sum();
      // mean_weight() makes the mean over the ranks equal to the mean over all rows of the batch.
      (loss * fsdp::mean_weight(x.size(0), mesh)).backward();
      optimizer.step();
      optimizer.zero_grad();
      mean.update(loss.item<double>(), static_cast<double>(x.size(0)));
    }
    mean.sync(*world);
    if (world->rank() == 0) {
      std::cout << "epoch " << epoch << " loss " << mean.compute() << std::endl;
    }
  }
}
// [data_parallel]

int main() {
  return comm::run_main(&run_rank);
}

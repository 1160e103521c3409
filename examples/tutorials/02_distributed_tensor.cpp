// Distributed tensors are at::Tensors: every at:: function and autograd take them.
//   tessera-run --nproc 4 -- build/bin/tutorial_02_distributed_tensor

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"tp"});

  // 7 rows rarely divide: shards are torch.chunk's, and may be empty.
  const at::Tensor whole_a = at::arange(7 * 6, c10::kDouble).view({7, 6});
  const at::Tensor whole_b = at::arange(6 * 5, c10::kDouble).view({6, 5});

  // Split over the inner dimension, a product is a pending sum ...
  at::Tensor a = distribute_tensor(whole_a, mesh, {Shard{1}});
  const at::Tensor b = distribute_tensor(whole_b, mesh, {Shard{0}});
  // After the distribution: the leaf is the distributed tensor, and its gradient is distributed
  // like it.
  a.requires_grad_();
  const DistributedTensor product(at::mm(a, b));

  // ... which a redistribution completes: here a reduce-scatter onto the rows.
  const DistributedTensor rows = product.redistribute({Shard{0}});
  const at::Tensor whole = rows.full_tensor();
  TESSERA_CHECK(at::allclose(whole, at::mm(whole_a, whole_b)), "the product is wrong");

  // Gradients flow back through the communication.
  rows.tensor().sum().backward();
  const at::Tensor grad = DistributedTensor(a.grad()).full_tensor();
  TESSERA_CHECK(at::allclose(grad, whole_b.sum(1).expand({7, 6})), "the gradient is wrong");

  if (world->rank() == 0) {
    std::cout << to_string(product.placements()) << " -> " << to_string(rows.placements())
              << ", this rank holds " << rows.to_local().sizes() << " of " << whole.sizes()
              << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}

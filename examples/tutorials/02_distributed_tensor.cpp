// Meshes and distributed tensors. A mesh arranges the ranks in dimensions; mesh["tp"] is a mesh
// too. A distributed tensor is an at::Tensor, so at:: functions and autograd accept it.
//   tessera-run --nproc 4 -- build/bin/tutorial_02_distributed_tensor

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

/// All-reduces the global rank over "tp": ranks that differ only in their "tp" coordinate get the
/// same sum. Communicators accept only plain tensors.
double sum_of_ranks(const DeviceMesh& mesh) {
  const at::Tensor sum = at::full({1}, static_cast<double>(mesh.world()->rank()));
  mesh.group("tp").all_reduce(sum, ReduceOp::kSum)->wait();
  double expected = 0;
  for (const int rank : mesh["tp"].ranks()) {
    expected += rank;
  }
  TESSERA_CHECK(sum.item<double>() == expected, "rank ", mesh.world()->rank(), " got ",
                sum.item<double>(), ", expected ", expected);
  return expected;
}

void run_rank() {
  // A process that no launcher started forms a world (comm::World) of one rank. Under tessera-run,
  // torchrun, Slurm or Open MPI, the ranks find each other through environment variables.
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});
  const double sum = sum_of_ranks(mesh);

  // The 7 rows need not be divisible by the number of ranks: shards are split as in torch.chunk,
  // and may be empty.
  const at::Tensor whole_a = at::arange(7 * 6, c10::kDouble).view({7, 6});
  const at::Tensor whole_b = at::arange(6 * 5, c10::kDouble).view({6, 5});

  // Both matrices are split over the inner dimension, so their matrix product is Partial: each rank
  // has one term of a sum.
  at::Tensor a = distribute_tensor(whole_a, mesh["tp"], {Shard{1}});
  const at::Tensor b = distribute_tensor(whole_b, mesh["tp"], {Shard{0}});
  // requires_grad_() is called after the distribution, so that the distributed tensor is the
  // autograd leaf. The gradient of a leaf has the placements of the leaf.
  a.requires_grad_();
  const DistributedTensor product(at::mm(a, b));

  // Redistributing the Partial matrix product to Shard{0} is a reduce-scatter over the rows.
  const DistributedTensor rows = product.redistribute({Shard{0}});
  const at::Tensor whole = rows.full_tensor();
  TESSERA_CHECK(at::allclose(whole, at::mm(whole_a, whole_b)), "the product is wrong");

  // backward() also differentiates the redistribution.
  rows.tensor().sum().backward();
  const at::Tensor grad = DistributedTensor(a.grad()).full_tensor();
  TESSERA_CHECK(at::allclose(grad, whole_b.sum(1).expand({7, 6})), "the gradient is wrong");

  if (world->rank() == 0) {
    std::cout << to_string(mesh) << ": row sum " << sum << "\n"
              << to_string(product.placements()) << " -> " << to_string(rows.placements())
              << ", this rank holds " << rows.to_local().sizes() << " of " << whole.sizes()
              << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}

// Meshes: a rank's place in a mesh, slices of a mesh, and a collective over one mesh dimension.
//   tessera-run --nproc 4 -- build/bin/tutorial_01_mesh

#include <ATen/ops/full.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

void run_rank() {
  // A process that no launcher started is a world of one rank. Under tessera-run, torchrun, Slurm
  // or Open MPI, the ranks find each other through environment variables.
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});

  // A slice of a mesh is a mesh. Slicing twice returns the same object, so process groups are
  // created once.
  TESSERA_CHECK(mesh["tp"] == mesh["tp"], "a slice of a mesh is one object");

  // All-reduces the global rank over "tp": ranks that differ only in their "tp" coordinate get the
  // same sum. Communicators work on plain tensors; they do not know DTensor.
  at::Tensor sum = at::full({1}, static_cast<double>(world->rank()));
  mesh.group("tp").all_reduce(sum, ReduceOp::kSum)->wait();

  double expected = 0;
  for (const int rank : mesh["tp"].ranks()) {
    expected += rank;
  }
  TESSERA_CHECK(sum.item<double>() == expected, "rank ", world->rank(), " got ", sum.item<double>(),
                ", expected ", expected);
  if (world->rank() == 0) {
    std::cout << to_string(mesh) << ": row sum " << expected << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}

// Meshes: who am I, who are my neighbours, and a collective over one dimension.
//   tessera-run --nproc 4 -- build/bin/tutorial_01_mesh

#include <ATen/ops/full.h>

#include <iostream>

#include "tessera/tessera.hpp"

using namespace tessera;

void run_rank() {
  // One process without a launcher is a world of one; under tessera-run, torchrun, Slurm or Open
  // MPI the ranks find each other through the environment.
  const comm::WorldPtr world = comm::world_from_environment();
  const std::int64_t tp = world->size() % 2 == 0 ? 2 : 1;
  const DeviceMesh mesh = init_device_mesh(world, {world->size() / tp, tp}, {"dp", "tp"});

  // Slices are meshes too, and slicing twice gives the same object: groups are made once.
  TESSERA_CHECK(mesh["tp"] == mesh["tp"], "a slice of a mesh is one object");

  // The sum over tp of each rank's number: ranks of a row agree, rows differ.
  // A plain tensor: a communicator is below DTensor and moves what it is given.
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

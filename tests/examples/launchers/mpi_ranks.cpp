// Makes worlds from MPI communicators. mpirun starts this program on three ranks. Rank 0 prints
// "well" if all results are right.

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <iostream>

#include "tessera/comm/mpi_world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"

namespace {

using namespace tessera;

void compute_on(const comm::WorldPtr& world) {
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  const int size = world->size();
  at::Tensor sum = at::full({1}, world->rank() + 1, at::kLong);
  mesh.group("dp").all_reduce(sum, ReduceOp::kSum)->wait();
  TESSERA_CHECK(sum.item<std::int64_t>() == size * (size + 1) / 2, "the sum is ",
                sum.item<std::int64_t>());
  const at::Tensor whole = at::arange(7 * 2, at::kFloat).view({7, 2});
  const at::Tensor rows = distribute_tensor(whole, mesh, {Shard{0}});
  TESSERA_CHECK(at::allclose(DistributedTensor(rows.sum(0)).full_tensor(), whole.sum(0)),
                "the sum over the rows is wrong");
}

void run_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const comm::WorldScope scope(comm::world_from_mpi(MPI_COMM_WORLD));
  TESSERA_CHECK(scope.world()->rank() == rank, "rank ", scope.world()->rank(), " instead of ",
                rank);
  compute_on(scope.world());

  // `part` contains ranks 2 and 0, in this order, or only rank 1.
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
  const comm::WorldScope part_scope(comm::world_from_mpi(part));
  // The world must not use the MPI communicator after world_from_mpi() has returned.
  MPI_Comm_free(&part);
  TESSERA_CHECK(part_scope.world()->size() == (rank == 1 ? 1 : 2), "the part has ",
                part_scope.world()->size(), " ranks");
  TESSERA_CHECK(part_scope.world()->rank() == (rank == 0 ? 1 : 0), "rank ", rank, " became ",
                part_scope.world()->rank());
  compute_on(part_scope.world());
  // Rank 1 has made fewer worlds by rendezvous than ranks 0 and 2, but all ranks must join here.
  const comm::WorldScope launched(comm::world_from_environment());
  compute_on(launched.world());
  MPI_Barrier(MPI_COMM_WORLD);
  try {
    comm::world_from_mpi(MPI_COMM_NULL);
    fail("MPI_COMM_NULL was accepted");
  } catch (const Error& error) {
    TESSERA_CHECK(std::string(error.what()).find("MPI_COMM_NULL") != std::string::npos,
                  error.what());
  }
  if (rank == 0) {
    std::cout << "well" << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int status = comm::run_main(&run_rank);
  MPI_Finalize();
  return status;
}

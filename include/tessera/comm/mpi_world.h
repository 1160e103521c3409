#pragma once

/// @file
/// A world of the ranks of an MPI communicator. tessera.hpp does not include this header, because a
/// program that includes this header must link MPI.

#include <mpi.h>

#include <cstddef>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Makes a World of the processes of `ranks`, such as MPI_COMM_WORLD. A process has the same rank
/// in the World as in `ranks`. The World can outlive the communicator. Collective over `ranks`.
/// Throws Error if MPI is not initialised or fails, and for MPI_COMM_NULL.
///   MPI_Init(&argc, &argv);
///   const comm::WorldScope scope(comm::world_from_mpi(MPI_COMM_WORLD));
inline WorldPtr world_from_mpi(MPI_Comm ranks, const WorldOptions& options = {}) {
  const auto check = [](int code, const char* call) {
    TESSERA_CHECK(code == MPI_SUCCESS, "world_from_mpi: ", call, " failed with the MPI error code ",
                  code, "; pass a communicator that MPI_Comm_free has not freed");
  };
  int initialized = 0;
  int finalized = 0;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  check(MPI_Finalized(&finalized), "MPI_Finalized");
  TESSERA_CHECK(initialized != 0 && finalized == 0, "world_from_mpi: MPI is ",
                finalized != 0 ? "finalised already" : "not initialised",
                "; call world_from_mpi between MPI_Init and MPI_Finalize");
  TESSERA_CHECK(ranks != MPI_COMM_NULL,
                "world_from_mpi: the communicator is MPI_COMM_NULL; call world_from_mpi only on "
                "the ranks of a communicator");
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(ranks, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(ranks, &size), "MPI_Comm_size");
  const auto broadcast = [&](void* bytes, std::size_t count) {
    check(MPI_Bcast(bytes, static_cast<int>(count), MPI_BYTE, 0, ranks), "MPI_Bcast");
  };
  return world_from_broadcast(rank, size, broadcast, options);
}

}  // namespace tessera::comm
TESSERA_API_END

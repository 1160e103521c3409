// The program late_rank SECONDS: all-reduces on a mesh of four GPUs. Rank 1 starts SECONDS late.

#include <ATen/ops/ones.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/mesh/device_mesh.h"

int main(int, char** arguments) {
  return tessera::comm::run_main([&] {
    const tessera::comm::WorldScope scope(
        tessera::comm::world_from_environment({.device = "cuda", .backend = "nccl"}));
    if (scope.world()->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(std::atoi(arguments[1])));
    }
    const tessera::DeviceMesh mesh = tessera::init_device_mesh(scope.world(), {2, 2}, {"dp", "tp"});
    for (const char* name : {"tp", "dp"}) {
      mesh.group(name).all_reduce(at::ones({3}, mesh.device()), tessera::ReduceOp::kSum)->wait();
    }
    mesh.flatten()
        .group()
        .all_reduce(at::ones({3}, mesh.device()), tessera::ReduceOp::kSum)
        ->wait();
  });
}

// Operators of torch.ops.tessera, for Python programs. A mesh is passed as an integer id.
// Environment variables configure the processes of the job, as for torchrun.

#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rank/rank.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/strict_scope.h"

namespace tessera {
namespace {

/// The meshes of this process; never destroyed, because tensors can outlive static objects.
struct Meshes {
  static Meshes& instance() {
    static auto* meshes = new Meshes;
    return *meshes;
  }

  std::int64_t add(const std::string& device, std::vector<std::int64_t> shape,
                   std::vector<std::string> names) {
    std::lock_guard lock(mutex);
    all.push_back(init_device_mesh(world(device), std::move(shape), std::move(names)));
    return static_cast<std::int64_t>(all.size()) - 1;
  }

  DeviceMesh get(std::int64_t handle) {
    std::lock_guard lock(mutex);
    TESSERA_CHECK(handle >= 0 && static_cast<std::size_t>(handle) < all.size(), "mesh handle ",
                  handle, " is not among the ", all.size(), " handles of init_device_mesh");
    return all[static_cast<std::size_t>(handle)];
  }

 private:
  /// Returns the World for a device type, made by the first call. The caller holds the mutex.
  const comm::WorldPtr& world(const std::string& device) {
    auto& made = worlds[device];
    if (!made) {
      comm::WorldOptions options;
      options.device = device;
      options.backend = device == "cuda" ? "nccl" : "gloo";
      made = comm::world_from_environment(options);
    }
    return made;
  }

  std::mutex mutex;
  std::map<std::string, comm::WorldPtr> worlds;
  std::vector<DeviceMesh> all;
};

Placements parse(const std::vector<std::string>& texts) {
  Placements placements;
  for (const auto& text : texts) {
    placements.push_back(parse_placement(text));
  }
  return placements;
}

// Implementations of the operators. An operator schema has only simple types, so meshes are passed
// as integers and placements as strings.

at::Tensor from_local(const at::Tensor& local, std::int64_t mesh,
                      std::vector<std::string> placements,
                      std::optional<std::vector<std::int64_t>> sizes) {
  return DistributedTensor::from_local(local, Meshes::instance().get(mesh), parse(placements),
                                       std::move(sizes));
}

std::vector<std::string> placements(const at::Tensor& tensor) {
  std::vector<std::string> texts;
  for (const auto& placement : DistributedTensor(tensor).placements()) {
    texts.push_back(to_string(placement));
  }
  return texts;
}

bool set_replication(bool replicate) {
  thread_local std::optional<ReplicationScope> scope;
  const bool before = plain_tensors_are_replicated();
  scope.emplace(replicate);
  return before;
}

// Operators that are defined together with an implementation are composite: autograd records the
// operators that the implementation calls.
TORCH_LIBRARY(tessera, library) {
  using Texts = std::vector<std::string>;
  library.def("init_device_mesh(str device, int[] shape, str[] names) -> int",
              [](std::string device, std::vector<std::int64_t> shape, Texts names) {
                return Meshes::instance().add(device, std::move(shape), std::move(names));
              });
  library.def("distribute_tensor(Tensor tensor, int mesh, str[] placements) -> Tensor",
              [](const at::Tensor& tensor, std::int64_t mesh, Texts placements) -> at::Tensor {
                return distribute_tensor(tensor, Meshes::instance().get(mesh), parse(placements));
              });
  library.def("from_local(Tensor local, int mesh, str[] placements, int[]? sizes=None) -> Tensor",
              &from_local);
  library.def("redistribute(Tensor tensor, str[] placements) -> Tensor",
              [](const at::Tensor& tensor, Texts placements) -> at::Tensor {
                return DistributedTensor(tensor).redistribute(parse(placements));
              });
  library.def("full_tensor(Tensor tensor) -> Tensor",
              [](const at::Tensor& tensor) { return DistributedTensor(tensor).full_tensor(); });
  library.def("to_local(Tensor tensor) -> Tensor",
              [](const at::Tensor& tensor) { return DistributedTensor(tensor).to_local(); });
  library.def("placements(Tensor tensor) -> str[]", &placements);
  // Sets whether implicit communication throws outside of every StrictScope; returns the old value.
  library.def("set_strict(bool strict) -> bool",
              [](bool strict) { return detail::RankState::here()->strict.exchange(strict); });
  library.def("set_replication(bool replicate) -> bool", &set_replication);
  library.def("is_distributed(Tensor tensor) -> bool",
              [](const at::Tensor& tensor) { return is_distributed(tensor); });
  library.def("manual_seed(int seed) -> ()",
              [](std::int64_t seed) { manual_seed(static_cast<std::uint64_t>(seed)); });
}

}  // namespace
}  // namespace tessera

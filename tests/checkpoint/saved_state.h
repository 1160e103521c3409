#pragma once

// A model and an optimizer state with known values, for the tests of sharded checkpoints.

#include <filesystem>

#include "checkpoint/known_model.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/dtensor/detail/make_distributed.h"

namespace tessera::checkpoint {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A Net on a mesh of dp × tp with AdamW state. Parameters have Values() + `add`; exp_avg is 1000
/// times the parameter.
struct SavedState {
  SavedState(Rank& rank, const std::vector<std::int64_t>& mesh_sizes, int add = 0,
             bool tied = false)
      : net(tied) {
    const DeviceMesh mesh = rank.mesh(mesh_sizes, {"dp", "tp"});
    Tensors values = Values();
    for (auto& [name, tensor] : values) {
      tensor = tensor + add;
    }
    Distribute(net, mesh, values);
    for (const auto& [name, slot] : net.named_slots()) {
      const at::Tensor& tensor = slot->persistent();
      optimizer.emplace_back(name + ".exp_avg",
                             make_distributed(local_tensor(tensor).detach() * 1000,
                                              sharding_spec(tensor), tensor.sizes().vec()));
      optimizer.emplace_back(name + ".step", at::full({}, 7.0F + static_cast<float>(add)));
    }
  }
  StateDict dict() { return {net, optimizer, {{"samples", 640}}}; }
  /// All parameters and optimizer tensors of this rank, by name.
  Tensors local() const {
    Tensors values = LocalValues(net);
    for (const auto& [name, tensor] : optimizer) {
      values[name] = local_tensor(tensor).clone();
    }
    return values;
  }

  Net net;
  NamedTensors optimizer;
};

/// Saves a step from a 2 × 2 mesh.
inline void SaveStep(const std::filesystem::path& dir, std::int64_t step, int add = 0,
                     const SaveOptions& options = {}) {
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, add);
    save(*rank.world(), dir, step, state.dict(), options);
  });
}

/// Loads the newest step on one rank and expects the values of `add`. Returns the step's number.
inline std::int64_t ExpectLoads(const std::filesystem::path& dir, int add) {
  std::int64_t step = -1;
  RunRanks(1, [&](Rank& rank) {
    SavedState loaded(rank, {1, 1}, -5000);
    const SavedState expected(rank, {1, 1}, add);
    step = load(*rank.world(), dir, loaded.dict()).step;
    ExpectEqual(loaded.local(), expected.local());
  });
  return step;
}

}  // namespace tessera::checkpoint

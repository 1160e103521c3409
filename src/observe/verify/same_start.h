// The common start of both runs: weights, buffers, modes, and the random numbers.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/manual_seed.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::observe {

/// Throws Error unless `reference` has the parameters and buffers of `module`, plain ones of equal
/// sizes. Not collective.
void check_reference(const nn::ModuleBase& module, const nn::ModuleBase& reference);

/// Gives `reference` memory if it has none, and the values and modes of `module`. Collective over
/// the meshes of its parameters.
void copy_to_reference(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh);

/// Changes every weight by about one unit in the last place, up or down; `draw` says which.
void change_last_places(nn::ModuleBase& reference, std::uint64_t draw);

/// How many random operators a rank's module has counted: its Dropouts', and those of at::.
struct DrawCounts {
  RandomState state;
  std::vector<std::pair<std::string, std::uint64_t>> dropouts;  ///< by FQN
};
DrawCounts draw_counts(const nn::ModuleBase& module);
/// `ahead` is added to each.
void set_draw_counts(nn::ModuleBase& module, const DrawCounts& counts, std::uint64_t ahead = 0);

/// Whether `counts` are more than those that were set.
bool have_drawn(const DrawCounts& counts, const DrawCounts& set, std::uint64_t ahead);

/// What a run changes of a module and of this thread: put back at the end. The gradients are taken
/// off.
class StateAside {
 public:
  explicit StateAside(nn::ModuleBase& module);
  ~StateAside();
  StateAside(const StateAside&) = delete;
  StateAside& operator=(const StateAside&) = delete;

 private:
  using Values = std::vector<std::pair<nn::SlotPtr, at::Tensor>>;
  nn::ModuleBase& module_;
  Values gradients_, buffers_;
  DrawCounts counts_;
  std::int64_t batch_ranks_;
};

}  // namespace tessera::observe

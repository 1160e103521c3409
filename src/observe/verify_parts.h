// What the sources of verify() share: the tensors of one run, the common start of both runs, and
// the comparison.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/manual_seed.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/observe/verify.h"

namespace tessera::observe {

/// A tensor of a run on this rank, without autograd: distributed as it was, or plain.
struct SeenTensor {
  std::string name;  ///< "output of 'layers.0.norm', call 2"; the same in each run
  std::string fqn;   ///< of the module or parameter
  at::Tensor value;
  std::string caller{};   ///< FQN of the module that called `fqn`
  int call = 0;           ///< which call of the run, from 1; 0: none
  int parent = 0;         ///< the call within which it was made; 0: none
  bool is_input = false;  ///< of the call; not compared by itself
};

/// The tensors that one run of a step has produced.
struct SeenRun {
  /// Inputs when a call begins, outputs when it ends, the result of the step last.
  std::vector<SeenTensor> tensors;
  std::vector<SeenTensor> gradients;  ///< in backward's order; none without a backward
  std::map<std::string, int> calls;   ///< how often each module was called, by FQN
  std::int64_t rows = 0;              ///< dimension 0 of the first tensor passed to the module
};

/// Runs `step` with `module`, and backward if the result has a gradient. The parameters have no
/// gradients before and after. Collective where the step is. An exception of the step becomes an
/// Error that names the innermost running module; a PeerError stays one.
SeenRun run_step(nn::ModuleBase& module, const VerifyStep& step);

/// Throws Error unless `reference` has the parameters and buffers of `module`, plain ones of equal
/// sizes. Not collective.
void check_reference(const nn::ModuleBase& module, const nn::ModuleBase& reference);
/// Gives `reference` memory if it has none, and the values and modes of `module`. Collective over
/// the meshes of its parameters.
void copy_to_reference(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh);
/// Changes every weight by about one unit in the last place, up or down; `draw` seeds the choice.
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

/// Saves what a run changes of a module and of this thread, and restores it at the end. Removes the
/// gradients meanwhile.
class SavedState {
 public:
  explicit SavedState(nn::ModuleBase& module);
  ~SavedState();
  SavedState(const SavedState&) = delete;
  SavedState& operator=(const SavedState&) = delete;

 private:
  using Values = std::vector<std::pair<nn::SlotPtr, at::Tensor>>;
  nn::ModuleBase& module_;
  Values gradients_, buffers_;
  DrawCounts counts_;
  std::int64_t batch_ranks_;
};

/// How far rounding alone moves the tensors of one rank's run, in the order of SeenRun.
struct Noise {
  std::vector<double> tensors, gradients;
};
/// Raises `noise` to at least the largest difference of `run` from `other`, a run of the same step.
/// Infinity for a tensor that one of the two lacks, or has in other sizes.
void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other);

/// The dimensions of `mesh` that are not in `dims`.
std::vector<std::string> other_dims(const DeviceMesh& mesh, const std::vector<std::string>& dims);
/// The distance from 1 to the next number of a tensor's type; 0 of integers, which are exact.
double epsilon_of(c10::ScalarType type);

/// Compares this rank's run on the mesh with its run on one rank. The same report on every rank.
/// Collective over `mesh`. Throws Error, on every rank, if the ranks did not call the same modules.
VerifyReport compare(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                     const DeviceMesh& mesh, const VerifyOptions& options);

}  // namespace tessera::observe

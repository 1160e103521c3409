// Declarations that the source files of verify() share: the tensors of a run, and the comparison.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/observe/verify.h"

namespace tessera::observe {

/// A tensor that this rank has seen in a run, detached from autograd. A distributed tensor is
/// stored as a distributed tensor, not gathered.
struct SeenTensor {
  std::string name;  ///< the tensor's name, equal in each run: "output of 'layers.0.norm', call 2"
  std::string fqn;   ///< FQN of the module that was called, or of the parameter
  at::Tensor value;
  std::string caller{};  ///< FQN of the module that called the module `fqn`
  int call = 0;          ///< index of the module call in the run, from 1; 0: no module call
  int parent = 0;        ///< index of the enclosing module call; 0: none
  /// Whether the tensor is an input of a module call. Inputs only help to find a cause.
  bool is_input = false;
};

/// The tensors of one run of a training step.
struct SeenRun {
  /// The tensors in the order of the run: a module call's inputs when the call begins, its outputs
  /// when the call ends, and finally the result of the step.
  std::vector<SeenTensor> tensors;
  std::vector<SeenTensor> gradients;  ///< gradients in backward's order; empty if no backward ran
  std::map<std::string, int> calls;
  std::int64_t rows = 0;  ///< number of rows in the root module's first input
};

/// How much rounding changes each tensor of a one-rank SeenRun.
struct Noise {
  std::vector<double> tensors, gradients;
};
/// Raises `noise` to at least the differences between two runs of one step. Sets infinity for a
/// tensor that one run lacks, or that has different sizes in the two runs.
void raise_noise(Noise& noise, const SeenRun& run, const SeenRun& other);

/// Returns the names of the dimensions of `mesh` that are not in `dims`.
std::vector<std::string> other_dims(const DeviceMesh& mesh, const std::vector<std::string>& dims);
/// Returns the rounding unit of a dtype: the distance from 1 to the next larger number; 0 for
/// integers, which are exact.
double epsilon_of(c10::ScalarType type);

/// Compares this rank's run on the mesh with its one-rank run. Every rank returns the same report.
/// Collective over `mesh`. Throws Error, on every rank, if the ranks called different modules.
VerifyReport compare(const SeenRun& on_mesh, const SeenRun& one_rank, const Noise& noise,
                     const DeviceMesh& mesh, const VerifyOptions& options);

}  // namespace tessera::observe

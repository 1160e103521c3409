#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A function that runs one step with a module and returns the loss, a scalar. verify() calls
/// backward on the loss. For inference, the function instead returns a tensor of any sizes that was
/// computed without gradients, and verify() runs no backward.
using VerifyStep = std::function<at::Tensor(nn::ModuleBase& module)>;

/// Options of verify().
struct VerifyOptions {
  /// The mesh dimensions along which ranks have different samples: the dimensions of FSDP and of
  /// replicas. The gradient on the mesh must equal the mean, over these dimensions, of the one-rank
  /// gradients.
  std::vector<std::string> batch_dims{};
  /// If true, a step of the parallel module computes only this rank's samples, while a step of the
  /// reference computes the samples of all ranks. Needed if other ranks' samples influence a
  /// result: with context parallelism, auxiliary losses of experts, or a statistic of the whole
  /// batch. verify() then compares the gradients and the mean of the loss over `batch_dims`, but no
  /// outputs.
  bool splits_samples = false;
  /// The least precise dtype in which the parallel module computes or reduces. Required if this
  /// dtype is less precise than the dtype of the reference's parameters.
  std::optional<c10::ScalarType> coarsest{};
};

/// A tensor on the mesh that differs from the one-rank reference.
struct VerifyDifference {
  std::string fqn;   ///< FQN of the module or parameter; "" for the model itself and for the loss
  std::string text;  ///< one line: tensor name, sizes, layout, index, both values, ranks
};

/// The result of verify(), equal on every rank.
struct VerifyReport {
  /// Module outputs that differ from the reference, in the order in which the calls of the
  /// reference's modules end. All outputs before the first entry are equal.
  std::vector<VerifyDifference> outputs{};
  std::vector<VerifyDifference> gradients{};  ///< gradients that differ, in backward's order
  /// A line that names the weights that differ between ranks. If this line is not empty, nothing
  /// else was compared.
  std::string weights{};
  std::size_t modules = 0;     ///< number of modules whose outputs were compared
  std::size_t parameters = 0;  ///< number of parameters whose gradients were compared
  /// The largest difference of a value that passed, divided by the largest value of all outputs
  /// (for gradients: of all gradients).
  double largest = 0;
  /// The module in which to search for the cause of the first entry in `outputs`: the entry's
  /// module or, if the input of the entry's module already differs, the caller of this module.
  std::string cause{};

  /// Whether verify() found no difference.
  bool ok() const { return outputs.empty() && gradients.empty() && weights.empty(); }
  /// The report as text: one line if everything is equal, otherwise one line for each of the first
  /// differences.
  std::string text() const;
  /// Throws an Error with the first difference, in one line, unless ok() is true.
  void check() const;
};

/// Runs `step`, forward and backward, with a one-rank model and with the parallelized model, using
/// equal weights. Compares each module's outputs, the result of the step and each parameter's
/// gradient. An error in a tensor-parallel plan or in the model's code appears as the first output
/// or gradient that differs from that of one rank. See docs/verify.md.
///
/// `reference`: a second instance of the same class with the same options, not parallelized. The
/// parameters may be on the meta device. verify() copies the weights, buffers and train or eval
/// modes of `module` to `reference`. The reference computes in the dtype of its own parameters, and
/// cannot be used afterwards. verify() runs `reference` three times. In two of these runs, each
/// weight is changed by about a rounding error, to measure the differences that rounding can cause.
/// `mesh`: all ranks of the run. `step` must do the same at each call; the random number generators
/// start from the same state for each call. A rank's step uses the rank's own samples. Choose small
/// samples: every rank computes the samples of all ranks with all weights, and stores all inputs
/// and outputs.
///
/// Distributed outputs are compared as whole tensors, with Partial outputs reduced. A plain output
/// must equal the output of the reference on each rank. If the sizes differ, the concatenation of
/// the outputs of all ranks must equal the output of the reference.
///
/// Gradients, buffers and random number states are restored at the end. The hooks remain in the
/// modules but do nothing. Collective over `mesh`. Throws Error on every rank if `reference` does
/// not fit `module`, or if the step throws with `reference`. If the step throws on the mesh,
/// verify() throws only on the ranks where the step throws.
VerifyReport verify(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
                    const VerifyStep& step, const VerifyOptions& options = {});

/// verify() for a step that takes the class of the model instead of nn::ModuleBase:
///
///   observe::verify(*model, *std::make_shared<Gpt>(config), mesh, [&](Gpt& gpt) {
///     return cross_entropy(gpt(tokens), targets);
///   }, {.batch_dims = {"dp"}}).check();
template <class Model, class Step>
VerifyReport verify(Model& module, Model& reference, const DeviceMesh& mesh, const Step& step,
                    const VerifyOptions& options = {}) {
  const VerifyStep of_base = [&step](nn::ModuleBase& each) -> at::Tensor {
    return step(static_cast<Model&>(each));
  };
  return verify(static_cast<nn::ModuleBase&>(module), static_cast<nn::ModuleBase&>(reference), mesh,
                of_base, options);
}

}  // namespace tessera::observe
TESSERA_API_END

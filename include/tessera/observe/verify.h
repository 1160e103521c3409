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

/// Runs one step with a module. Returns a scalar loss, for which verify() runs backward, or a
/// tensor that was computed without gradients (inference).
using VerifyStep = std::function<at::Tensor(nn::ModuleBase& module)>;

/// Options of verify().
struct VerifyOptions {
  /// The mesh dimensions along which ranks have different samples (FSDP, replicas). Gradients on
  /// the mesh must equal the mean of the one-rank gradients over these dimensions.
  std::vector<std::string> batch_dims{};
  /// Whether the reference computes the samples of all ranks in one step. Needed with context
  /// parallelism, auxiliary losses of experts, and other results that depend on other ranks'
  /// samples. verify() then compares gradients and the mean loss over `batch_dims`, but no outputs.
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
  /// The module in which to search for the cause of the first entry of `outputs`: the entry's
  /// module. If the inputs of this module differ, too: the module's caller.
  std::string cause{};

  /// Whether verify() found no difference.
  bool ok() const { return outputs.empty() && gradients.empty() && weights.empty(); }
  /// The report as text: one line if everything is equal, otherwise one line for each of the first
  /// differences.
  std::string text() const;
  /// Throws an Error with the first difference, in one line, unless ok() is true.
  void check() const;
};

/// Runs `step` with a one-rank model and with the parallelized model, with equal weights. Compares
/// each module's outputs, the result of the step and the gradients. See docs/verify.md.
///
/// `reference`: a second, not parallelized instance of the model, possibly on the meta device.
/// verify() copies the weights, buffers and modes of `module` to `reference`. Do not use
/// `reference` afterwards. `mesh`: all ranks of the run. `step` must do the same at each call, with
/// the rank's own samples. Use small samples: every rank computes the samples of all ranks with all
/// weights, and stores all inputs and outputs.
///
/// Gradients, buffers and random number states are restored. Collective over `mesh`. Throws Error
/// on every rank if `reference` does not fit `module`, or if `step` throws with `reference`. If
/// `step` throws with `module`, verify() throws only on the ranks where `step` throws.
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

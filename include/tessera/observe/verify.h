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

/// One step with a module. Returns the loss, one number, on which verify() calls backward; or, for
/// a model that is used for inference alone, a result of any sizes computed without gradients.
using VerifyStep = std::function<at::Tensor(nn::ModuleBase& module)>;

/// How verify() runs and compares.
struct VerifyOptions {
  /// Those dimensions of the mesh whose ranks have different samples: the gradient on the mesh is
  /// the mean over them of one rank's. FSDP's and its replicas'.
  std::vector<std::string> batch_dims{};
  /// Whether the step takes a part of each sample with the module, where it takes all of it with
  /// the reference (context parallelism). Outputs can't be compared then: only gradients and, as
  /// a mean over `batch_dims`, the loss.
  bool splits_samples = false;
  /// The type with the fewest digits that the mesh computes or reduces in, where the reference's
  /// parameters have more.
  std::optional<c10::ScalarType> coarsest{};
};

/// A tensor of the mesh that is not what one rank has.
struct VerifyDifference {
  std::string fqn;         ///< of the module or parameter; "" for the model itself, and the loss
  std::string text;        ///< one line: what, sizes and layout, where, the values, the ranks
  std::vector<int> ranks;  ///< world ranks that have it
  double difference = 0;   ///< the largest
  double allowed = 0;      ///< what rounding makes
};

/// What verify() has found, the same on every rank.
struct VerifyReport {
  /// In the order in which the calls end on one rank: all before the first one is equal.
  std::vector<VerifyDifference> outputs{};
  std::vector<VerifyDifference> gradients{};
  /// Not empty: the ranks have different weights, which this line names; nothing else was looked
  /// at.
  std::string weights{};
  std::size_t modules = 0;     ///< whose outputs were compared
  std::size_t parameters = 0;  ///< whose gradients were
  /// The largest difference, as a share of the largest value of its kind.
  double largest = 0;

  bool ok() const { return outputs.empty() && gradients.empty() && weights.empty(); }
  /// One line if all is equal, else one for each difference, the first ones of many.
  std::string text() const;
  /// Throws Error of one line, with the first difference, unless ok().
  void check() const;
};

/// Runs `step` with one rank's model and with the parallelized one, forward and backward of the
/// same weights, and compares: each output of a module, the result of the step, each parameter's
/// gradient. What is wrong in a plan or in a model's own code shows as the first module whose
/// output is not one rank's, or as the parameter whose gradient is not. docs/verify.md.
///
/// `reference`: a second instance, of the same class and options, that nothing was applied to; it
/// may be on the meta device. It gets the weights, buffers and modes of `module`, computes in
/// the type that its own parameters have, and is of no use afterwards. It is run three times, twice
/// with weights that rounding changed: that shows which differences rounding makes.
/// `mesh`: all ranks of the run. `step` must do the same at each call; random numbers are counted
/// from the same number for each. A rank's step takes its own samples, small ones: every rank
/// computes them all, with all weights, and keeps all outputs.
///
/// Distributed outputs are compared whole, and pending sums are reduced. A plain one must be the
/// reference's on each rank, or if it has other sizes, the ranks' parts one after another.
///
/// Afterwards the module is as before: gradients, buffers and random numbers are put back. Its
/// hooks stay, and do nothing. Collective over `mesh`. Throws Error on every rank if the reference
/// does not fit, or the step throws with it; if it throws on the mesh, on the ranks where it does,
/// as any step of a program.
VerifyReport verify(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
                    const VerifyStep& step, const VerifyOptions& options = {});

/// The same, for a step that takes the class of the model:
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

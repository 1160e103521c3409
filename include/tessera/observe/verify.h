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
  /// The dimensions of the mesh along which ranks have different samples: those of FSDP and its
  /// replicas. The gradient on the mesh must be the mean over them of one rank's gradients.
  std::vector<std::string> batch_dims{};
  /// The step takes a part of the samples with the module, and all of them with the reference. For
  /// context parallelism, for experts that get rows of other ranks, and for a loss or a statistic
  /// of the whole batch. Outputs can't be compared then: only the gradients, and the loss as a mean
  /// over `batch_dims`.
  bool splits_samples = false;
  /// The type with the fewest digits that the mesh computes or reduces in, if the reference's
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
  std::vector<VerifyDifference> gradients{};  ///< in the order in which backward computes them
  /// Not empty: the ranks have different weights, which this line names. Nothing else was compared.
  std::string weights{};
  std::size_t modules = 0;     ///< whose outputs were compared
  std::size_t parameters = 0;  ///< whose gradients were
  /// The largest difference, as a share of the largest value of its kind.
  double largest = 0;
  /// Where to look for the first of `outputs`: in its module, or if the module's input differs
  /// already, in the one that calls it.
  std::string cause{};

  bool ok() const { return outputs.empty() && gradients.empty() && weights.empty(); }
  /// One line if all is equal, else one for each difference, the first ones of many.
  std::string text() const;
  /// Throws Error of one line, with the first difference, unless ok().
  void check() const;
};

/// Runs `step` with one rank's model and with the parallelized one, forward and backward of the
/// same weights, and compares each output of a module, the result of the step, and each parameter's
/// gradient. A fault in a plan or in a model's own code shows as the first output or gradient that
/// is not one rank's. docs/verify.md.
///
/// `reference`: a second instance, of the same class and options, to which nothing was applied; it
/// may be on the meta device. It gets the weights, buffers and modes of `module`, computes in the
/// type of its own parameters, and is of no use afterwards. It is run three times, twice with
/// weights that rounding changed: that shows which differences rounding makes.
/// `mesh`: all ranks of the run. `step` must do the same at each call; random numbers are counted
/// from the same number for each. A rank's step takes its own samples, small ones: every rank
/// computes them all, with all weights, and keeps all inputs and outputs.
///
/// Distributed outputs are compared whole, and pending sums are reduced. A plain one must be the
/// reference's on each rank, or if it has other sizes, the ranks' parts one after another.
///
/// Afterwards gradients, buffers and random numbers are restored. The hooks stay in the modules,
/// and do nothing. Collective over `mesh`. Throws Error on every rank if the reference does not
/// fit, or if the step throws with it. If the step throws on the mesh, the ranks on which it does
/// throw, as in any step of a program.
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

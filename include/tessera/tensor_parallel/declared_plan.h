#pragma once

#include "tessera/export.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// A program's options for the plans that modules declare.
struct DeclaredPlanOptions {
  bool sequence_parallel = true;  ///< activations between the halves of a block are split
  bool loss_parallel = true;      ///< logits stay split over the vocabulary
  bool regather = true;           ///< split inputs are kept for backward, and gathered again there
};

/// A module class that says itself how it is split, and all that is below it:
///
///   class Mlp : public nn::Module<Mlp>, public tensor_parallel::DeclaresPlan {
///     tensor_parallel::ParallelizePlan tensor_parallel_plan(
///         const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions&) const override {
///       return {{"up", tensor_parallel::colwise_parallel()},
///               {"down", tensor_parallel::rowwise_parallel()}};
///     }
///     ...
///   };
///   tensor_parallel::parallelize_module(model, mesh["tp"]);
class DeclaresPlan {
 public:
  virtual ~DeclaresPlan() = default;
  /// The plan for this module on a 1-D mesh; patterns are relative to it. Throws Error where the
  /// module cannot be split over as many ranks. Not collective.
  virtual ParallelizePlan tensor_parallel_plan(const DeviceMesh& mesh,
                                               const DeclaredPlanOptions& options) const = 0;
};

/// The plan of `module`, or the plans of the outermost modules below it that declare one, with
/// their FQNs. Not collective. Throws Error if none does, and what they throw.
ParallelizePlan declared_plan(const nn::ModuleBase& module, const DeviceMesh& mesh,
                              const DeclaredPlanOptions& options = {});

/// parallelize_module() with the declared plan.
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh);

}  // namespace tessera::tensor_parallel
TESSERA_API_END

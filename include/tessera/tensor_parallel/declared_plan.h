#pragma once

#include "tessera/export.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Options that a program passes to the plans that modules declare.
struct DeclaredPlanOptions {
  /// Whether activations outside of attention and MLP are split along the sequence.
  bool sequence_parallel = true;
  bool loss_parallel = true;  ///< whether logits remain split over the vocabulary
  bool regather = true;       ///< value of PrepareModuleInputOptions::regather
};

/// Interface of a module class that declares the tensor-parallel plan for itself and the modules
/// below it:
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
  /// The plan for this module on a 1-D mesh. Patterns are relative to the module. Throws Error if
  /// the module cannot be split over the mesh's ranks. Not collective.
  virtual ParallelizePlan tensor_parallel_plan(const DeviceMesh& mesh,
                                               const DeclaredPlanOptions& options) const = 0;
};

/// The plan that `module` declares (DeclaresPlan). If `module` declares no plan: the plans of the
/// outermost modules below `module` that declare a plan, with their FQNs as prefixes. Not
/// collective. Throws Error if no module declares a plan, and the Errors of tensor_parallel_plan().
ParallelizePlan declared_plan(const nn::ModuleBase& module, const DeviceMesh& mesh,
                              const DeclaredPlanOptions& options = {});

/// Applies declared_plan() of `module`, with the default options, to `module`:
/// parallelize_module(module, mesh, declared_plan(module, mesh)).
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh);

}  // namespace tessera::tensor_parallel
TESSERA_API_END

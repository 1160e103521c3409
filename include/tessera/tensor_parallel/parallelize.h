#pragma once

#include <initializer_list>
#include <string>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Applies a tensor-parallel plan on a 1-D mesh, like PyTorch's parallelize_module. Call before
/// fully_shard:
///
///   parallelize_module(model, mesh["tp"], {{"layers.*.mlp.up_proj", colwise_parallel()},
///                                          {"layers.*.mlp.down_proj", rowwise_parallel()}});
///
/// Parameters become distributed with the placements of their styles. Parameters without a style
/// become Replicate(), except parameters that differ on each rank
/// (ParameterSlot::set_distinct_along). In the forward of `module`, plain tensors must be equal on
/// every rank. The gradient of a plain tensor is plain and complete. The gradient of a parameter
/// has the parameter's placement.
///
/// Not collective: every rank must have the complete parameters. In the first forward the ranks
/// compare replicated parameters and plain inputs. Throws Error, before any change, for a pattern
/// that matches no module, or matches in only some layers of one class. Throws Error for an
/// unsuitable style, and if two styles place one module's parameters. Throws Error for a
/// distributed parameter, and if the number of ranks does not divide the number of heads.
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan);

/// Options of the tensor-parallel plans that modules declare (DeclaresPlan).
struct DeclaredPlanOptions {
  /// Whether activations outside of attention and MLP blocks are sharded along the sequence.
  bool sequence_parallel = true;
  bool loss_parallel = true;  ///< whether logits remain sharded over the vocabulary
  bool regather = true;       ///< whether backward gathers the inputs of blocks again
};

/// Interface of a module class that declares a tensor-parallel plan for its modules:
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
  /// Returns this module's tensor-parallel plan on a 1-D mesh, with patterns relative to this
  /// module. Not collective. Throws Error if the parameters cannot be sharded over the mesh.
  virtual ParallelizePlan tensor_parallel_plan(const DeviceMesh& mesh,
                                               const DeclaredPlanOptions& options) const = 0;
};

/// Returns the plan that `module` declares or, without one, the plans of its outermost submodules
/// with a plan, with FQN prefixes. Not collective. Throws Error if no module declares a plan, and
/// the Errors of tensor_parallel_plan().
ParallelizePlan declared_plan(const nn::ModuleBase& module, const DeviceMesh& mesh,
                              const DeclaredPlanOptions& options = {});

/// Applies the plan that `module` declares, with the default options: parallelize_module(module,
/// mesh, declared_plan(module, mesh)).
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh);

/// Options for the tensor-parallel plan of a block (attention or MLP) of a model.
struct BlockPlanOptions {
  /// The placement of the block's input and of its result: Replicate, or for sequence parallelism
  /// (Korthikanti et al. 2022) Shard of the token dimension.
  Placement activations = Replicate{};
  /// Whether backward gathers the input of the block again, so that only the input's shard is saved
  /// (PrepareModuleInputOptions::regather).
  bool regather = false;
  /// Whether the key and value projections use replicated_heads_parallel(), for an Attention that
  /// has fewer key and value heads than there are ranks.
  bool replicate_kv_heads = false;
};

// Functions that return the plan entries of one block, as in Megatron-LM (Shoeybi et al. 2019):
// column-wise first Linears, a row-wise last Linear. Forward and backward each need one all-reduce,
// with sequence parallelism one all-gather and one reduce-scatter. `fqn`: the block's FQN or a
// pattern. The number of ranks must divide the number of heads.

/// Returns the row-wise plan of an nn::Embedding: the vocabulary is sharded. The embedding's input
/// must be equal on all ranks; the input options of `block` are not used.
ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options = {});
/// Returns the plan of an nn::Attention with the options `block`. Throws Error for options that an
/// nn::Attention cannot use, and for replicate_kv_heads together with fused_qkv.
ParallelizePlan attention_plan(const std::string& fqn, const nn::AttentionOptions& block,
                               const BlockPlanOptions& options = {});
/// Returns the tensor-parallel plan of an nn::SwiGlu with the module names `names`.
ParallelizePlan swi_glu_plan(const std::string& fqn, const nn::MlpNames& names = {},
                             const BlockPlanOptions& options = {});
/// Returns the tensor-parallel plan of an nn::GeluMlp with the module names `names`.
ParallelizePlan gelu_mlp_plan(const std::string& fqn, const nn::MlpNames& names = {},
                              const BlockPlanOptions& options = {});
/// Returns the plan of an nn::MixtureOfExperts with options `block`. Each rank computes its shard
/// of the tokens. swi_glu_plan() is the plan of the shared expert.
/// nn::apply_expert_parallel() places the experts' weights; the mesh's last dimension must be the
/// tensor-parallel dimension.
ParallelizePlan experts_plan(const std::string& fqn, const nn::ExpertsOptions& block,
                             const BlockPlanOptions& options = {});
/// Joins the entries of all `plans`, in order, into one plan.
ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans);

}  // namespace tessera::tensor_parallel
TESSERA_API_END

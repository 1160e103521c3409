#pragma once

#include <initializer_list>
#include <string>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/mlp.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Options for the tensor-parallel plan of a block (attention or MLP) of a model.
struct BlockPlanOptions {
  /// The placement of the block's input and result: Replicate, or with sequence parallelism Shard
  /// of the token dimension (Korthikanti et al. 2022).
  Placement activations = Replicate{};
  /// Whether the block's result is the plain local tensor.
  bool use_local_output = false;
  /// Whether backward gathers the input of the block again instead of saving the gathered input
  /// (PrepareModuleInputOptions::regather).
  bool regather = false;
  /// Whether key and value projections use replicated_heads_parallel(), for an Attention with fewer
  /// key and value heads than ranks.
  bool replicate_kv_heads = false;
};

// Functions that return the plan entries for one block, as in Megatron-LM (Shoeybi et al. 2019):
// the first Linears are column-wise, and the last Linear is row-wise. A block needs one all-reduce
// in forward and one in backward, or with sequence parallelism an all-gather and a reduce-scatter
// in each. `fqn`: the FQN of the block, or a pattern such as "layers.*.attn". parallelize_module()
// checks the plan, and throws Error if the ranks do not divide the heads. Features that do not
// belong to heads may be split unevenly.

/// The plan of an nn::Embedding, which is row-wise: the vocabulary is split. The input of the
/// embedding must be the same on all ranks. Options for the input are not used.
ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options = {});
/// The plan of an nn::Attention with the options `block`. Throws Error for options that
/// nn::Attention refuses, and for replicate_kv_heads together with fused_qkv.
ParallelizePlan attention_plan(const std::string& fqn, const nn::AttentionOptions& block,
                               const BlockPlanOptions& options = {});
/// The plan of an nn::SwiGlu with the module names `names`.
ParallelizePlan swi_glu_plan(const std::string& fqn, const nn::MlpNames& names = {},
                             const BlockPlanOptions& options = {});
/// The plan of an nn::GeluMlp with the module names `names`.
ParallelizePlan gelu_mlp_plan(const std::string& fqn, const nn::MlpNames& names = {},
                              const BlockPlanOptions& options = {});
/// One plan with the entries of all `plans`, in order.
ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans);

}  // namespace tessera::tensor_parallel
TESSERA_API_END

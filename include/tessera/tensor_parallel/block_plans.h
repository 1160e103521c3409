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

/// How a block fits into its model.
struct BlockPlanOptions {
  /// The placement of input and result: Replicate, or with sequence parallelism Shard of the
  /// dimension of the tokens (Korthikanti et al. 2022).
  Placement activations = Replicate{};
  /// Whether the result is the local tensor.
  bool use_local_output = false;
  /// As PrepareModuleInputOptions::regather, for the input of the block.
  bool regather = false;
  /// For an Attention with fewer key and value heads than ranks: replicated_heads_parallel().
  bool replicate_kv_heads = false;
};

// The entries of a plan for one block, as in Megatron-LM (Shoeybi et al. 2019): column-wise, then
// row-wise. A block sends one all-reduce in forward and one in backward, or with sequence
// parallelism an all-gather and a reduce-scatter in each. `fqn`: the FQN of the block, or a pattern
// such as "layers.*.attn". parallelize_module() checks the plan. It throws Error for heads that the
// ranks do not divide. Other features may be uneven.

/// The plan of an nn::Embedding: row-wise. Its input is the same on all ranks. Options of the input
/// are not used.
ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options = {});
/// The plan of an nn::Attention with these options. Throws Error for options that nn::Attention
/// throws for, and for replicate_kv_heads together with fused_qkv.
ParallelizePlan attention_plan(const std::string& fqn, const nn::AttentionOptions& block,
                               const BlockPlanOptions& options = {});
/// The plan of an nn::SwiGlu with these names.
ParallelizePlan swi_glu_plan(const std::string& fqn, const nn::MlpNames& names = {},
                             const BlockPlanOptions& options = {});
/// The plan of an nn::GeluMlp with these names.
ParallelizePlan gelu_mlp_plan(const std::string& fqn, const nn::MlpNames& names = {},
                              const BlockPlanOptions& options = {});
/// All entries of some plans, in order.
ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans);

}  // namespace tessera::tensor_parallel
TESSERA_API_END

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

/// Where the blocks of a plan stand in their model.
struct BlockPlanOptions {
  /// The placement of the block's input and result: Replicate, or with sequence parallelism Shard
  /// on the tokens' dimension (Korthikanti et al. 2022).
  Placement activations = Replicate{};
  /// Whether the result is the local tensor, or a distributed one.
  bool use_local_output = false;
  /// As PrepareModuleInputOptions::regather, of the block's input.
  bool regather = false;
  /// For an Attention with fewer key and value heads than ranks: computes each head on several
  /// ranks (replicated_heads_parallel).
  bool replicate_kv_heads = false;
};

// The entries of a plan for one block, as Megatron-LM splits it (Shoeybi et al. 2019): column-wise
// in, row-wise out. A block sends one all-reduce forward and one backward, or with sequence
// parallelism an all-gather and a reduce-scatter each. `fqn`: the block's name or a pattern,
// "layers.*.attn". Nothing is checked here: parallelize_module refuses heads that the ranks don't
// divide. Other features need not divide.

/// The plan of an nn::Embedding: row-wise, each rank has a part of the vocabulary. Its input is the
/// same on all ranks; only the options of the result are read.
ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options = {});
/// The plan of an nn::Attention with these options. Throws Error for options that an Attention
/// refuses, and for replicated key and value heads that are in one projection.
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

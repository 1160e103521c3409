// Plans for the blocks of nn, which a model would otherwise write for each projection.

#include "tessera/tensor_parallel/block_plans.h"

#include <cstdint>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {
namespace {

/// One gather for all projections of the block's input. Without sequence parallelism the input is
/// only made distributed, so that its gradients are summed once.
std::pair<std::string, StylePtr> gathered(const std::string& fqn, const BlockPlanOptions& options) {
  return {fqn, prepare_module_input({.input_layouts = {Replicate{}},
                                     .desired_input_layouts = {Replicate{}},
                                     .regather = options.regather})};
}

StylePtr back(const BlockPlanOptions& options, std::int64_t heads = 0) {
  return rowwise_parallel({.output_layouts = options.activations,
                           .use_local_output = options.use_local_output,
                           .heads = heads});
}

}  // namespace

ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options) {
  return {{fqn, rowwise_parallel({.output_layouts = options.activations,
                                  .use_local_output = options.use_local_output})}};
}

ParallelizePlan attention_plan(const std::string& fqn, const nn::AttentionOptions& block,
                               const BlockPlanOptions& options) {
  const nn::AttentionOptions o = nn::completed(block);
  const nn::AttentionNames& names = o.names;
  const auto below = [&](const std::string& name) { return nn::join_fqn(fqn, name); };
  ParallelizePlan plan{gathered(fqn, options)};
  const StylePtr kv_heads = options.replicate_kv_heads
                                ? replicated_heads_parallel({.heads = o.kv_heads})
                                : colwise_parallel({.heads = o.kv_heads});
  TESSERA_CHECK(!o.fused_qkv || !options.replicate_kv_heads, "attention_plan: '", fqn,
                "' has its key and value heads in one projection with the queries, which can't be "
                "replicated; set fused_qkv = false");
  // Whole heads.
  if (o.fused_qkv) {
    plan.emplace_back(below(names.fused), fused_colwise_parallel());
  } else {
    plan.emplace_back(below(names.query), colwise_parallel({.heads = o.heads}));
    plan.emplace_back(below(names.key), kv_heads);
    plan.emplace_back(below(names.value), kv_heads);
  }
  if (o.qk_norm) {
    // (batch, tokens, heads, head_dim).
    const StylePtr norm = sequence_parallel({.sequence_dim = 2});
    plan.emplace_back(below("q_norm"), norm);
    plan.emplace_back(below("k_norm"), norm);
  }
  plan.emplace_back(below(names.output), back(options, o.heads));
  return plan;
}

/// Distributed between the Linears: the ranks need not divide the width of an MLP.
ParallelizePlan swi_glu_plan(const std::string& fqn, const nn::MlpNames& names,
                             const BlockPlanOptions& options) {
  const StylePtr width = colwise_parallel();
  return {gathered(fqn, options),
          {nn::join_fqn(fqn, names.gate), width},
          {nn::join_fqn(fqn, names.up), width},
          {nn::join_fqn(fqn, names.down), back(options)}};
}

ParallelizePlan gelu_mlp_plan(const std::string& fqn, const nn::MlpNames& names,
                              const BlockPlanOptions& options) {
  return {gathered(fqn, options),
          {nn::join_fqn(fqn, names.up), colwise_parallel()},
          {nn::join_fqn(fqn, names.down), back(options)}};
}

ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans) {
  ParallelizePlan all;
  for (const ParallelizePlan& plan : plans) {
    all.insert(all.end(), plan.begin(), plan.end());
  }
  return all;
}

}  // namespace tessera::tensor_parallel

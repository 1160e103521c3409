// Tensor-parallel plans and parallelize_module: also plans that modules declare, and plans for the
// blocks of nn. parallelize_module checks the plan, then distributes all parameters, then adds
// hooks, so that a plan with an error changes nothing.

#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/fqn_pattern.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"
#include "replica_check.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"
#include "tessera/tensor_parallel/block_plans.h"
#include "tessera/tensor_parallel/declared_plan.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::RandomRegion;
using tessera::detail::RandomRegionScope;

/// Makes a parameter plain again that an earlier plan replicated because the plan did not name the
/// parameter.
void make_plain(nn::ParameterSlot& slot) {
  const at::Tensor before = slot.get();
  slot.swap(local_tensor(before).detach().requires_grad_(before.requires_grad()));
  slot.role.replicated_by_default = false;
  if (before.requires_grad()) {
    nn::retire_parameter(before, slot.get(), "parallelize_module");
  }
}

void distribute_parameters(const CheckedPlan& plan, const DeviceMesh& mesh) {
  for (const auto& [slot, placement] : plan.parameters) {
    if (slot->role.replicated_by_default) {
      make_plain(*slot);
    }
    // Skips a tied parameter that an earlier call has distributed.
    if (!tessera::is_distributed(slot->get())) {
      nn::distribute_parameter(*slot, mesh, {placement}, "parallelize_module");
    }
  }
  for (const auto& [fqn, slot] : plan.unnamed) {
    nn::distribute_parameter(*slot, mesh, {Replicate{}}, "parallelize_module");
    slot->role.replicated_by_default = true;
  }
}

/// Declares that plain tensors are the same on every rank of `mesh`, in the forward of `module` and
/// in its other hooked methods.
void add_parallel_forward(nn::ModuleBase& module, const DeviceMesh& mesh) {
  // The scopes of calls in progress form a stack, since the module may call itself. An entry is
  // nullptr for a call within the forward of another parallel module.
  const auto scopes = std::make_shared<std::vector<std::unique_ptr<RandomRegionScope>>>();
  module.add_forward_pre_hook(
      [scopes, mesh](auto&, nn::TensorList) {
        const tessera::detail::RandomRegionPtr& outer = tessera::detail::random_region();
        std::unique_ptr<RandomRegionScope>& scope = scopes->emplace_back();
        if (outer == nullptr || !outer->replicates_on(mesh)) {
          scope = std::make_unique<RandomRegionScope>(
              std::make_shared<RandomRegion>(outer, nullptr, mesh));
        }
      },
      nn::HookedCalls::kEveryMethod);
  module.add_always_hook(
      [scopes] {
        // The stack is empty if another hook threw before the pre-hook ran.
        if (!scopes->empty()) {
          scopes->pop_back();
        }
      },
      nn::HookedCalls::kEveryMethod);
}

}  // namespace

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan) {
  const CheckedPlan checked = check_plan(module, mesh, plan);
  distribute_parameters(checked, mesh);
  // Added before the hooks of the styles, so that these hooks run inside the scope.
  add_parallel_forward(module, mesh);
  const auto replicas = std::make_shared<ReplicaCheck>(module, mesh);
  for (const Application& application : checked.applications) {
    nn::ModuleBase& target = *application.target.module;
    // A module with a style also starts the comparison, because it may be called directly instead
    // of through the root.
    if (replicas->add(target, application.target.fqn) && &target != &module) {
      add_parallel_forward(target, mesh);
    }
    // A module inside an nn::Hooked is skipped, because it runs no hooks.
    if (dynamic_cast<const nn::AdoptedModule*>(&target) == nullptr) {
      application.style->apply(target, mesh);
    }
  }
  replicas->watch_root(module);
}

ParallelizePlan declared_plan(const nn::ModuleBase& module, const DeviceMesh& mesh,
                              const DeclaredPlanOptions& options) {
  ParallelizePlan plan;
  std::vector<std::string> declared;
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    const bool is_inside = std::ranges::any_of(declared, [&fqn](const std::string& outer) {
      return outer.empty() || fqn.starts_with(outer + ".");
    });
    const auto* declares = dynamic_cast<const DeclaresPlan*>(&each);
    if (is_inside || declares == nullptr) {
      return;
    }
    declared.push_back(fqn);
    for (const auto& [pattern, style] : declares->tensor_parallel_plan(mesh, options)) {
      plan.emplace_back(pattern.empty() ? fqn : nn::detail::join_fqn(fqn, pattern), style);
    }
  });
  TESSERA_CHECK(!declared.empty(), "parallelize_module: no plan was given, and neither this ",
                module.name(), " nor a module below it declares one; pass a plan, or derive the ",
                "class from tensor_parallel::DeclaresPlan");
  return plan;
}

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh) {
  parallelize_module(module, mesh, declared_plan(module, mesh));
}

namespace {

/// The plan entry that makes the input of a block distributed, once for all projections. With
/// sequence parallelism the projections share one gather. Without sequence parallelism they share
/// the all-reduce of the input's gradient.
std::pair<std::string, StylePtr> shared_input(const std::string& fqn,
                                              const BlockPlanOptions& options) {
  return {fqn, prepare_module_input({.input_layouts = {Replicate{}},
                                     .desired_input_layouts = {Replicate{}},
                                     .regather = options.regather})};
}

StylePtr output_projection(const BlockPlanOptions& options, std::int64_t heads = 0) {
  return rowwise_parallel({.output_layouts = options.activations,
                           .use_local_output = options.use_local_output,
                           .heads = heads});
}

}  // namespace

ParallelizePlan embedding_plan(const std::string& fqn, const BlockPlanOptions& options) {
  return {{fqn, output_projection(options)}};
}

ParallelizePlan attention_plan(const std::string& fqn, const nn::AttentionOptions& block,
                               const BlockPlanOptions& options) {
  const nn::AttentionOptions o = nn::detail::completed(block);
  const nn::AttentionNames& names = o.names;
  const auto below = [&](const std::string& name) { return nn::detail::join_fqn(fqn, name); };
  ParallelizePlan plan{shared_input(fqn, options)};
  const StylePtr kv_heads = options.replicate_kv_heads
                                ? replicated_heads_parallel({.heads = o.kv_heads})
                                : colwise_parallel({.heads = o.kv_heads});
  TESSERA_CHECK(!o.fused_qkv || !options.replicate_kv_heads, "attention_plan: '", fqn,
                "' has fused_qkv, but replicate_kv_heads needs a projection for the keys and one "
                "for the values; set fused_qkv = false");
  if (o.fused_qkv) {
    plan.emplace_back(below(names.fused), fused_colwise_parallel());
  } else {
    plan.emplace_back(below(names.query), colwise_parallel({.heads = o.heads}));
    plan.emplace_back(below(names.key), kv_heads);
    plan.emplace_back(below(names.value), kv_heads);
  }
  if (o.qk_norm) {
    // the shape of the activations is (batch, tokens, heads, head_dim)
    const StylePtr norm = sequence_parallel({.sequence_dim = 2});
    plan.emplace_back(below("q_norm"), norm);
    plan.emplace_back(below("k_norm"), norm);
  }
  plan.emplace_back(below(names.output), output_projection(options, o.heads));
  return plan;
}

ParallelizePlan swi_glu_plan(const std::string& fqn, const nn::MlpNames& names,
                             const BlockPlanOptions& options) {
  const StylePtr width = colwise_parallel();
  return {shared_input(fqn, options),
          {nn::detail::join_fqn(fqn, names.gate), width},
          {nn::detail::join_fqn(fqn, names.up), width},
          {nn::detail::join_fqn(fqn, names.down), output_projection(options)}};
}

ParallelizePlan gelu_mlp_plan(const std::string& fqn, const nn::MlpNames& names,
                              const BlockPlanOptions& options) {
  return {shared_input(fqn, options),
          {nn::detail::join_fqn(fqn, names.up), colwise_parallel()},
          {nn::detail::join_fqn(fqn, names.down), output_projection(options)}};
}

ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans) {
  ParallelizePlan all;
  for (const ParallelizePlan& plan : plans) {
    all.insert(all.end(), plan.begin(), plan.end());
  }
  return all;
}

}  // namespace tessera::tensor_parallel

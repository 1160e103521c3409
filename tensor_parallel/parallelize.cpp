// Tensor-parallel plans: parallelize_module(), plans that modules declare, and plans for blocks
// such as nn::Attention. parallelize_module first checks the whole plan, so that an invalid plan
// changes nothing.

#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/module.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <typeindex>
#include <unordered_set>

#include "internal.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/parameter.h"

namespace tessera::tensor_parallel {
std::string quoted(const std::string& fqn) {
  return fqn.empty() ? "the root module" : "'" + fqn + "'";
}

bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh) {
  const DeviceMesh& distinct = slot.distinct_along();
  return distinct && std::ranges::any_of(distinct.ranks(), [&](int rank) {
           return rank != mesh.world()->rank() &&
                  std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
         });
}

namespace {

// check_plan() runs before any module changes. check_plan() finds the modules that each pattern
// matches, checks that the styles are applicable to these modules, and finds each parameter's
// placement.

/// A module and its FQN relative to the root of the plan ("" for the root).
struct NamedModule {
  std::string fqn;
  nn::ModuleBase* module = nullptr;
};

struct Application {
  NamedModule target;
  StylePtr style;
  /// The placements that the style gives to the module's parameters, without parameters that the
  /// plan entry of an inner module places.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
};

struct CheckedPlan {
  std::vector<Application> applications;
  /// Each parameter that the plan places, with its placement, in the order of the plan.
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters;
  /// Parameters that no plan entry names, which become replicated. Parameters that are already
  /// distributed, or that differ on each rank, are not included.
  nn::NamedSlots unnamed;
};

// A Match can be a plain torch::nn module, which cannot have hooks, so that errors can name it.

struct Match {
  std::string fqn;
  torch::nn::Module* module = nullptr;
};

/// Returns all modules that match a pattern; a shared module appears once for each FQN.
std::vector<Match> find_places(nn::ModuleBase& root, const std::string& pattern) {
  std::vector<Match> places;
  nn::visit_modules(root,
                    [&](const std::string& fqn, torch::nn::Module& module) {
                      if (nn::matches_fqn(pattern, fqn)) {
                        places.push_back({fqn, &module});
                      }
                    },
                    {.every_place = true});
  return places;
}

std::vector<Match> first_places(std::vector<Match> places) {
  std::unordered_set<const torch::nn::Module*> found;
  std::erase_if(places,
                [&found](const Match& place) { return !found.insert(place.module).second; });
  return places;
}

/// Removes the last segment of a pattern: "layers.*.up" -> "layers.*", "layers" -> "".
std::string without_last_segment(const std::string& pattern) {
  const std::size_t dot = pattern.rfind('.');
  return dot == std::string::npos ? "" : pattern.substr(0, dot);
}

/// Throws the error for a pattern that matches no module. Removes segments from the pattern's end
/// until a module matches, and lists the children of this module.
[[noreturn]] void fail_unmatched(nn::ModuleBase& root, const std::string& pattern) {
  std::string reached = pattern;
  std::vector<Match> parents;
  std::string segment;
  while (parents.empty()) {  // the loop ends at the root, because "" matches the root
    const std::string shorter = without_last_segment(reached);
    segment = reached.substr(shorter.empty() ? 0 : shorter.size() + 1);
    reached = shorter;
    parents = find_places(root, reached);
  }
  const Match& parent = parents.front();
  fail("parallelize_module: the pattern '", pattern, "' matches no module: '", segment,
       "' is not among the children of ", quoted(parent.fqn), ", which are [",
       fmt::format("{}", fmt::join(parent.module->named_children().keys(), ", ")),
       "]; correct or remove the entry");
}

bool is_below(const Match& match, const Match& place) {
  return match.fqn.starts_with(place.fqn + ".");
}

std::type_index class_of(const Match& place) {
  const torch::nn::Module& module = *place.module;
  return typeid(module);
}

/// Throws Error if only one of two modules of the same class contains a match of `pattern`.
/// `prefix`: the beginning of `pattern`. `places`: the modules that match `prefix`. `matches`: the
/// modules that match `pattern`.
void check_all_match(const std::string& pattern, const std::string& prefix,
                     const std::vector<Match>& places, const std::vector<Match>& matches) {
  const auto has_match = [&matches](const Match& place) {
    return std::ranges::any_of(matches, [&](const Match& match) { return is_below(match, place); });
  };
  std::unordered_set<std::type_index> classes;
  std::size_t found = 0;
  std::vector<const Match*> missed;
  for (const Match& place : places) {
    if (has_match(place)) {
      classes.insert(class_of(place));
      ++found;
    } else {
      missed.push_back(&place);
    }
  }
  std::erase_if(missed, [&](const Match* place) { return !classes.contains(class_of(*place)); });
  if (missed.empty()) {
    return;
  }
  const std::string below = pattern.substr(prefix.size() + 1);
  fail("parallelize_module: the pattern '", pattern, "' finds a module in ", found, " of the ",
       found + missed.size(), " modules of one class at '", prefix, "', but none in '",
       missed.front()->fqn, "', whose children are [",
       fmt::format("{}", fmt::join(missed.front()->module->named_children().keys(), ", ")),
       "]; correct the pattern, list the modules instead of the wildcard (for example [0-2]), or "
       "write '**.",
       below, "' to skip modules without a match");
}

/// Whether the segment has wildcards other than "**", which stands for any number of segments.
bool is_wildcard(std::string_view segment) {
  return segment != "**" && segment.find_first_of("*?[") != std::string_view::npos;
}

/// Throws Error for a pattern that matches in some layers but not in others, because the plan would
/// silently skip the other layers.
void check_wildcards(nn::ModuleBase& root, const std::string& pattern,
                     const std::vector<Match>& matches) {
  std::size_t begin = 0;
  for (std::size_t dot = pattern.find('.'); dot != std::string::npos;
       dot = pattern.find('.', begin)) {
    const std::string prefix = pattern.substr(0, dot);
    if (is_wildcard(std::string_view(prefix).substr(begin))) {
      check_all_match(pattern, prefix, find_places(root, prefix), matches);
    }
    begin = dot + 1;
  }
}

NamedModule with_hooks(const Match& match) {
  auto* module = dynamic_cast<nn::ModuleBase*>(match.module);
  TESSERA_CHECK(
      module != nullptr, "parallelize_module: '", match.fqn, "' is a ", match.module->name(),
      ", which cannot run hooks; use the module of tessera::nn, or wrap the module in nn::Hooked");
  return {match.fqn, module};
}

/// Returns the modules whose FQN matches `pattern` (nn::matches_fqn): each module once, in order of
/// registration. The pattern "" matches `root`.
std::vector<NamedModule> match_modules(nn::ModuleBase& root, const std::string& pattern) {
  const std::vector<Match> matches = find_places(root, pattern);
  if (matches.empty()) {
    fail_unmatched(root, pattern);
  }
  check_wildcards(root, pattern, matches);
  std::vector<NamedModule> modules;
  for (const Match& match : first_places(matches)) {
    modules.push_back(with_hooks(match));
  }
  return modules;
}

/// Throws Error if the style needs hooks but `module` is inside an nn::Hooked, which runs no hooks
/// of modules inside.
void check_is_called(const NamedModule& target, const ParallelStyle& style) {
  TESSERA_CHECK(
      !style.adds_hooks() || dynamic_cast<const nn::AdoptedModule*>(target.module) == nullptr,
      style.name(), " with these options needs hooks, but a ", target.module->name(),
      " inside an nn::Hooked runs no hooks; use colwise_parallel() or rowwise_parallel() without "
      "layouts, or place_parameters()");
}

void check_gradients_are_dense(const nn::ModuleBase& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  const auto* embedding =
      holder == nullptr ? nullptr : holder->adopted_module().as<torch::nn::Embedding>();
  TESSERA_CHECK(embedding == nullptr || !embedding->options.sparse(), "the weight of a ",
                module.name(), " gets sparse gradients, which cannot be distributed; make the ",
                "module with sparse(false)");
}

Application applied(const NamedModule& target, const StylePtr& style, const DeviceMesh& mesh) {
  try {
    check_is_called(target, *style);
    Application application{target, style, style->parameters(*target.module)};
    style->check(*target.module, mesh);
    if (!application.parameters.empty()) {
      check_gradients_are_dense(*target.module);
    }
    return application;
  } catch (const Error& error) {
    fail("parallelize_module: ", quoted(target.fqn), ": ", error.what());
  }
}

bool is_below(const NamedModule& inner, const NamedModule& outer) {
  return inner.fqn != outer.fqn && (outer.fqn.empty() || inner.fqn.starts_with(outer.fqn + "."));
}

bool places(const Application& application, const nn::SlotPtr& slot) {
  return std::ranges::any_of(application.parameters,
                             [&](const auto& placed) { return placed.first == slot; });
}

bool is_own(const nn::ParameterSlot& slot, const nn::ModuleBase& module) {
  return std::ranges::any_of(slot.owners(),
                             [&](const auto& owner) { return owner.module == &module; });
}

/// A container and a module inside the container can have plan entries for the same parameter. The
/// entry of the inner module takes precedence.
void leave_to_inner(std::vector<Application>& applications) {
  for (Application& outer : applications) {
    std::erase_if(outer.parameters, [&](const auto& placed) {
      const auto takes = [&](const Application& inner) {
        return is_below(inner.target, outer.target) && places(inner, placed.first);
      };
      return !is_own(*placed.first, *outer.target.module) &&
             std::ranges::any_of(applications, takes);
    });
  }
}

class PlacementTable {
 public:
  explicit PlacementTable(const DeviceMesh& mesh) : mesh_(mesh) {}

  void add(const Application& application) {
    const auto& placements = application.parameters;
    // A module can have several styles, but only one style that places parameters.
    if (placements.empty()) {
      return;
    }
    const auto [owner, first] = styles_.emplace(application.target.module, application.style);
    TESSERA_CHECK(first, "parallelize_module: two entries of the plan place the parameters of ",
                  quoted(application.target.fqn), ": ", owner->second->name(), " and ",
                  application.style->name(), "; remove one of the two entries");
    for (const auto& [slot, placement] : placements) {
      add_slot(application, slot, placement);
    }
  }

  std::vector<std::pair<nn::SlotPtr, Placement>> take() { return std::move(placed_); }

 private:
  void add_slot(const Application& application, const nn::SlotPtr& slot,
                const Placement& placement) {
    check_slot(application, *slot, placement);
    const auto [known, first] = wanted_.emplace(slot.get(), placement);
    TESSERA_CHECK(known->second == placement, "parallelize_module: ", application.style->name(),
                  " places a parameter of ", quoted(application.target.fqn), " as ",
                  to_string(placement), ", but it is tied to a parameter with the placement ",
                  to_string(known->second), "; give both modules the same placement");
    if (first) {
      placed_.emplace_back(slot, placement);
    }
  }

  void check_slot(const Application& application, const nn::ParameterSlot& slot,
                  const Placement& placement) const {
    TESSERA_CHECK(!slot.has_persistent(), "parallelize_module: the parameters of ",
                  quoted(application.target.fqn),
                  " belong to an FSDP unit; call parallelize_module before fully_shard");
    const at::Tensor& tensor = slot.get();
    // to_layout throws for a placement that the sizes of the tensor do not permit.
    const LayoutPtr layout = to_layout({mesh_.size()}, {placement}, tensor.sizes());
    if (!tessera::is_distributed(tensor)) {
      return;
    }
    const ShardingSpec& spec = sharding_spec(tensor);
    if (slot.role.replicated_by_default && spec.mesh == mesh_) {
      return;
    }
    // If the parameter is tied to that of another module, an earlier parallelize_module() can have
    // distributed it. Otherwise the parameter's module already has a plan: an error.
    const bool tied = slot.owners().size() > 1;
    TESSERA_CHECK(tied && spec.mesh == mesh_ && spec.layout == layout,
                  "parallelize_module: a parameter of ", quoted(application.target.fqn),
                  " is distributed already, as ", to_string(*spec.layout), " on ",
                  to_string(spec.mesh), "; call parallelize_module once");
  }

  const DeviceMesh& mesh_;
  std::unordered_map<const nn::ModuleBase*, StylePtr> styles_;
  std::unordered_map<const nn::ParameterSlot*, Placement> wanted_;
  std::vector<std::pair<nn::SlotPtr, Placement>> placed_;
};

nn::NamedSlots unnamed_parameters(const nn::ModuleBase& module, const DeviceMesh& mesh,
                                  const CheckedPlan& plan) {
  nn::NamedSlots unnamed = module.named_slots();
  std::erase_if(unnamed, [&](const auto& entry) {
    const nn::SlotPtr& slot = entry.second;
    return slot->has_persistent() || is_distinct_on(*slot, mesh) ||
           tessera::is_distributed(slot->get()) ||
           std::ranges::any_of(plan.parameters,
                               [&](const auto& placed) { return placed.first == slot; });
  });
  return unnamed;
}

CheckedPlan check_plan(nn::ModuleBase& module, const DeviceMesh& mesh,
                       const ParallelizePlan& plan) {
  TESSERA_CHECK(mesh && mesh.ndim() == 1, "parallelize_module: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass a mesh of one dimension, for example mesh[\"tp\"]");
  module.named_slots();  // named_slots() throws if a parameter has no nn::ParameterSlot
  CheckedPlan checked;
  PlacementTable placements(mesh);
  for (const auto& [pattern, style] : plan) {
    TESSERA_CHECK(style != nullptr, "parallelize_module: the entry \"", pattern,
                  "\" has no style; add a style, or remove the entry");
    for (const NamedModule& target : match_modules(module, pattern)) {
      checked.applications.push_back(applied(target, style, mesh));
    }
  }
  leave_to_inner(checked.applications);
  for (const Application& application : checked.applications) {
    placements.add(application);
  }
  checked.parameters = placements.take();
  checked.unnamed = unnamed_parameters(module, mesh, checked);
  return checked;
}

using tessera::detail::RandomRegion;
using tessera::detail::RandomRegionScope;

void distribute_parameters(const CheckedPlan& plan, const DeviceMesh& mesh) {
  for (const auto& [slot, placement] : plan.parameters) {
    // A tied parameter is skipped if an earlier call of parallelize_module() has distributed it.
    if (slot->role.replicated_by_default || !tessera::is_distributed(slot->get())) {
      nn::distribute_parameter(*slot, mesh, {placement}, "parallelize_module");
    }
  }
  for (const auto& [fqn, slot] : plan.unnamed) {
    nn::distribute_parameter(*slot, mesh, {Replicate{}}, "parallelize_module");
    slot->role.replicated_by_default = true;
  }
}

/// Adds hooks to `module`: in its forward and its other hooked methods, plain tensors count as the
/// same on every rank of `mesh`.
void add_parallel_forward(nn::ModuleBase& module, const DeviceMesh& mesh) {
  // One entry per running call of the module: the scope in which plain tensors count as replicated,
  // or nullptr if an outer module has opened such a scope.
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
        // `scopes` is empty if another pre-hook threw before the pre-hook that adds a scope ran.
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
  // The styles' hooks are added later, to run inside the scope of add_parallel_forward().
  add_parallel_forward(module, mesh);
  const auto replicas = std::make_shared<ReplicaCheck>(module, mesh);
  for (const Application& application : checked.applications) {
    nn::ModuleBase& target = *application.target.module;
    // A program can call a submodule instead of the root, so each module with a style starts the
    // comparison of ReplicaCheck.
    if (replicas->add(target, application.target.fqn) && &target != &module) {
      add_parallel_forward(target, mesh);
    }
    // A module inside an nn::Hooked gets no hooks, because such hooks would never run.
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
  TESSERA_CHECK(!declared.empty(), "parallelize_module: no plan was passed, and neither this ",
                module.name(), " nor a module in it declares one; pass a plan, or derive the ",
                "class from tensor_parallel::DeclaresPlan");
  return plan;
}

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh) {
  parallelize_module(module, mesh, declared_plan(module, mesh));
}

namespace {

/// Returns the plan entry that distributes a block's input once for all projections. The
/// projections then share one gather of the input, or one all-reduce of the input's gradient.
std::pair<std::string, StylePtr> shared_input(const std::string& fqn,
                                              const BlockPlanOptions& options) {
  return {fqn, prepare_module_input({.input_layouts = {Replicate{}},
                                     .desired_input_layouts = {Replicate{}},
                                     .regather = options.regather})};
}

StylePtr output_projection(const BlockPlanOptions& options, std::int64_t heads = 0) {
  return rowwise_parallel({.output_layouts = options.activations, .heads = heads});
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
    // A q_norm or k_norm of single heads runs on sharded heads (batch, tokens, heads, head_dim). A
    // norm over all heads gathers the heads.
    const StylePtr norm =
        o.qk_norm_over_heads ? replicate_parallel() : sequence_parallel({.sequence_dim = 2});
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

ParallelizePlan experts_plan(const std::string& fqn, const nn::ExpertsOptions& block,
                             const BlockPlanOptions& options) {
  const nn::ExpertNames& names = block.names;
  ParallelizePlan plan{
      {nn::detail::join_fqn(fqn, names.router), sequence_parallel({.sequence_dim = 0})}};
  return block.shared_inner == 0
             ? plan
             : joined({plan, swi_glu_plan(nn::detail::join_fqn(fqn, names.shared), {}, options)});
}

ParallelizePlan joined(std::initializer_list<ParallelizePlan> plans) {
  ParallelizePlan all;
  for (const ParallelizePlan& plan : plans) {
    all.insert(all.end(), plan.begin(), plan.end());
  }
  return all;
}

}  // namespace tessera::tensor_parallel

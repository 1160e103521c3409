// Conversions of a model's Linears: fp8 matrix products, and LoRA adapters.

#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

#include <ATen/ops/matmul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {
namespace {

bool is_named_by(const LoraLinear& linear, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(
      patterns, [&](const std::string& pattern) { return matches_fqn(pattern, linear.fqn); });
}

template <class L>
void add_if_is(std::vector<LoraLinear>& found, const std::string& fqn, ModuleBase& module) {
  const auto* linear = dynamic_cast<const L*>(&module);
  if (linear == nullptr) {
    return;
  }
  found.push_back({.fqn = fqn, .module = &module, .weight = linear->weight.slot()});
  if (const auto branch = module.attached<LoraBranchOf<L>>()) {
    LoraLinear& each = found.back();
    each.a = branch->a->weight.slot();
    each.b = branch->b->weight.slot();
    each.dropout = branch->dropout;
    each.scale = branch->scale;
  }
}

/// Returns all Linears and GroupedLinears below `root`, with or without an adapter.
std::vector<LoraLinear> linears_below(const ModuleBase& root) {
  std::vector<LoraLinear> found;
  // `const_cast` is safe: libtorch returns the children of a const module as mutable modules.
  visit_modules(const_cast<ModuleBase&>(root), [&](const std::string& fqn, ModuleBase& module) {
    add_if_is<Linear>(found, fqn, module);
    add_if_is<GroupedLinear>(found, fqn, module);
  });
  return found;
}

void check_each_matches(std::string_view caller, const std::vector<std::string>& patterns,
                        const std::vector<LoraLinear>& linears, const ModuleBase& root,
                        std::string_view remedy) {
  for (const std::string& pattern : patterns) {
    TESSERA_CHECK(std::ranges::any_of(
                      linears, [&](const auto& each) { return matches_fqn(pattern, each.fqn); }),
                  caller, ": the pattern '", pattern, "' matches no nn::Linear of a ", root.name(),
                  "; ", remedy);
  }
}

/// Attached to a Linear that was converted to fp8. Parallel styles test for the Fp8Mark before they
/// replace the matrix product of the Linear.
struct Fp8Mark {};

void check_unchanged(const char* caller, const LoraLinear& found, const char* remedy) {
  const ParameterSlot& weight = *found.weight;
  TESSERA_CHECK(found.a == nullptr, caller, ": '", found.fqn, "' has an adapter; ", remedy);
  TESSERA_CHECK(!weight.has_persistent() && !tessera::is_distributed(weight.get()), caller, ": '",
                found.fqn, "' is distributed already; call ", caller,
                " before parallelize_module and fully_shard");
}

Linear* linear_of(const LoraLinear& found) {
  return dynamic_cast<Linear*>(found.module);
}

bool is_left(const LoraLinear& found, const Fp8Options& options) {
  const at::Tensor& weight = found.weight->get();
  return is_named_by(found, options.exclude) || weight.size(0) % options.multiple_of != 0 ||
         weight.size(1) % options.multiple_of != 0 || found.weight->owners().size() > 1;
}

}  // namespace

at::Tensor detail::fp8_product(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias) {
  const at::Tensor y = tessera::detail::fp8_linear(x, weight);
  return bias.defined() ? y.add(bias) : y;
}

std::vector<std::string> convert_to_fp8(ModuleBase& module, const Fp8Options& options) {
  std::vector<LoraLinear> linears = linears_below(module);
  std::erase_if(linears, [](const auto& each) { return linear_of(each) == nullptr; });
  TESSERA_CHECK(options.multiple_of >= 1, "convert_to_fp8: multiple_of is ", options.multiple_of,
                "; it must be 1 or more");
  check_each_matches("convert_to_fp8", options.exclude, linears, module,
                     "correct the pattern, or leave it out");
  for (const LoraLinear& each : linears) {
    TESSERA_CHECK(!is_fp8(*linear_of(each)), "convert_to_fp8: '", each.fqn,
                  "' is already converted; call convert_to_fp8 once");
    check_unchanged("convert_to_fp8", each, "call convert_to_fp8 before apply_lora");
  }
  std::vector<std::string> converted;
  for (const LoraLinear& each : linears) {
    if (!is_left(each, options)) {
      converted.push_back(each.fqn);
      each.module->attach(std::make_shared<Fp8Mark>());
      linear_of(each)->set_product(detail::fp8_product);
    }
  }
  return converted;
}

bool is_fp8(const Linear& linear) {
  return linear.attached<Fp8Mark>() != nullptr;
}

// LoRA is part of Linear::forward and not a hook: an adapter needs the exact input and result of
// the matrix product, which tensor-parallel hooks change.

namespace {

std::vector<LoraLinear> find_targets(const ModuleBase& root,
                                     const std::vector<std::string>& patterns) {
  TESSERA_CHECK(!patterns.empty(),
                "apply_lora was given no targets; name Linears, for example \"**.q_proj\"");
  std::vector<LoraLinear> targets = linears_below(root);
  check_each_matches(
      "apply_lora", patterns, targets, root,
      "patterns are compared with the FQNs of modules, and '**' matches any number of segments");
  std::erase_if(targets, [&](const auto& each) { return !is_named_by(each, patterns); });
  for (const LoraLinear& each : targets) {
    check_unchanged("apply_lora", each, "name each Linear in one call only");
    TESSERA_CHECK(each.weight->owners().size() == 1, "apply_lora: the weight of '", each.fqn,
                  "' is tied to the weight of another module, which the adapter would not change; "
                  "leave this Linear out");
  }
  return targets;
}

/// Makes matrix A or B of an adapter of `linear`; for a GroupedLinear, one such matrix per expert.
template <class L>
std::shared_ptr<L> matrix_beside(const L& linear, std::int64_t in, std::int64_t out) {
  const at::Tensor& weight = linear.weight;
  std::optional<MetaDevice> meta;
  if (weight.is_meta()) {
    meta.emplace();
  }
  std::shared_ptr<L> matrix;
  if constexpr (std::is_same_v<L, Linear>) {
    matrix = std::make_shared<Linear>(in, out, LinearOptions{.bias = false});
  } else {
    matrix = std::make_shared<GroupedLinear>(linear.experts(), in, out);
    matrix->weight.slot()->role.stored_parts = linear.weight.slot()->role.stored_parts;
    if (auto& stored = matrix->weight.slot()->role.stored_parts) {
      stored->depth = 2;
    }
  }
  matrix->weight.slot()->role.of_adapter = true;
  matrix->to(weight.device(), weight.scalar_type());
  return matrix;
}

template <class L>
void add_branch(L& linear, const LoraOptions& options) {
  const at::Tensor& weight = linear.weight;
  const auto branch = std::make_shared<LoraBranchOf<L>>();
  branch->dropout = options.dropout;
  branch->scale = options.alpha / static_cast<double>(options.rank);
  branch->a =
      linear.register_module("lora_A", matrix_beside(linear, weight.size(-1), options.rank));
  branch->b =
      linear.register_module("lora_B", matrix_beside(linear, options.rank, weight.size(-2)));
  linear.attach(branch);
}

/// Gathers matrix A or B of an adapter on every rank, on the device of the mesh.
at::Tensor whole(const at::Tensor& parameter) {
  if (!tessera::is_distributed(parameter)) {
    return parameter.detach();
  }
  // With CPU offload the shard is on the CPU, and must be moved to the device of the mesh.
  const ShardingSpec& spec = sharding_spec(parameter);
  const at::Tensor local = local_tensor(parameter).detach().to(spec.mesh.device());
  return DistributedTensor(make_distributed(local, spec, parameter.sizes().vec())).full_tensor();
}

/// Computes weight += scale * B A (LoRA), for this rank's shard of the weight.
void add_product(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b, double scale) {
  const at::Tensor local = local_tensor(weight).detach();
  // A GroupedLinear's weight has a dimension for experts before the two dimensions of the matrix.
  const std::int64_t row = weight.dim() - 2, column = row + 1;
  const auto add = [&](const Box& box) {
    const auto at = [&](std::int64_t dim) { return static_cast<std::size_t>(dim); };
    at::Tensor block = local;
    for (std::int64_t dim = 0; dim <= column; ++dim) {
      block = block.narrow(dim, box.local_offset[at(dim)], box.sizes[at(dim)]);
    }
    at::Tensor left = b.narrow(row, box.global_offset[at(row)], box.sizes[at(row)]);
    at::Tensor right = a.narrow(column, box.global_offset[at(column)], box.sizes[at(column)]);
    if (row > 0) {
      left = left.narrow(0, box.global_offset[0], box.sizes[0]);
      right = right.narrow(0, box.global_offset[0], box.sizes[0]);
    }
    block.add_(at::matmul(left, right).to(block.device()), scale);
  };
  if (!tessera::is_distributed(weight)) {
    const std::vector<std::int64_t> start(static_cast<std::size_t>(weight.dim()));
    add({start, start, weight.sizes().vec()});
    return;
  }
  const ShardingSpec& spec = sharding_spec(weight);
  for (const Box& box : owned_boxes(*spec.layout, weight.sizes(), spec.mesh.coordinate())) {
    add(box);
  }
}

}  // namespace

void apply_lora(ModuleBase& module, const LoraOptions& options) {
  TESSERA_CHECK(options.rank > 0, "apply_lora with rank ", options.rank,
                " is invalid; the rank must be 1 or more");
  TESSERA_CHECK(options.dropout >= 0 && options.dropout < 1, "apply_lora with dropout ",
                options.dropout, " is invalid; dropout must be in [0, 1)");
  const std::vector<LoraLinear> targets = find_targets(module, options.targets);
  // Parameters of adapters, including adapters of earlier apply_lora calls, remain trainable.
  const NamedSlots adapters = lora_slots(module);
  for (const auto& entry : module.named_slots()) {
    if (std::ranges::find(adapters, entry) == adapters.end()) {
      set_trainable(*entry.second, false);
    }
  }
  for (const LoraLinear& target : targets) {
    if (Linear* linear = linear_of(target)) {
      add_branch(*linear, options);
    } else {
      add_branch(dynamic_cast<GroupedLinear&>(*target.module), options);
    }
  }
}

std::vector<LoraLinear> lora_linears(const ModuleBase& module) {
  std::vector<LoraLinear> found = linears_below(module);
  std::erase_if(found, [](const LoraLinear& each) { return each.a == nullptr; });
  return found;
}

NamedSlots lora_slots(const ModuleBase& module) {
  NamedSlots slots;
  for (const LoraLinear& each : lora_linears(module)) {
    slots.emplace_back(detail::join_fqn(each.fqn, "lora_A.weight"), each.a);
    slots.emplace_back(detail::join_fqn(each.fqn, "lora_B.weight"), each.b);
  }
  return slots;
}

void merge_lora(ModuleBase& module) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<LoraLinear> linears = lora_linears(module);
  TESSERA_CHECK(!linears.empty(), "merge_lora: a ", module.name(),
                " has no adapters; call apply_lora first");
  // All Linears are checked before any Linear is changed, so that a failed merge can be repeated.
  for (const LoraLinear& each : linears) {
    for (const SlotPtr& slot : {each.weight, each.a, each.b}) {
      TESSERA_CHECK(slot->initialized(), "merge_lora: ", describe(*slot),
                    " has no values; initialise or load the parameter first");
      TESSERA_CHECK(!slot->role.gathered, "merge_lora: FSDP has gathered ", describe(*slot),
                    "; call merge_lora after backward, or call fsdp::reshard() first");
    }
  }
  for (const LoraLinear& each : linears) {
    const at::Tensor& b = each.b->persistent();
    add_product(each.weight->persistent(), whole(each.a->persistent()), whole(b), each.scale);
    local_tensor(b).detach().zero_();
  }
}

}  // namespace tessera::nn

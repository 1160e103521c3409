#include "tessera/nn/fp8.h"

#include <algorithm>
#include <memory>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace {

/// Attached to a Linear. Styles of parallelism, which set a product of their own, look for it.
struct Fp8Mark {};

struct Found {
  std::string fqn;
  Linear* linear;
};

std::vector<Found> linears_below(const ModuleBase& root) {
  std::vector<Found> found;
  // libtorch hands out the children of a const module as mutable ones, too.
  visit_modules(const_cast<ModuleBase&>(root), [&](const std::string& fqn, ModuleBase& module) {
    if (auto* linear = dynamic_cast<Linear*>(&module)) {
      found.push_back({fqn, linear});
    }
  });
  return found;
}

void check_convertible(const Found& found) {
  const auto refused = [&](const auto&... why) {
    fail("convert_to_fp8: '", found.fqn, "' ", why...);
  };
  const ParameterSlot& weight = *found.linear->weight.slot();
  if (is_fp8(*found.linear)) {
    refused("is converted already; call it once");
  }
  if (found.linear->attached<LoraBranch>() != nullptr) {
    refused("has an adapter; call convert_to_fp8 before apply_lora");
  }
  if (weight.has_persistent() || tessera::is_distributed(weight.get())) {
    refused(
        "is distributed already; call convert_to_fp8 before parallelize_module and "
        "fully_shard");
  }
}

void check_patterns(const std::vector<Found>& linears, const Fp8Options& options,
                    const ModuleBase& root) {
  TESSERA_CHECK(options.multiple_of >= 1, "convert_to_fp8: multiple_of is ", options.multiple_of,
                "; it must be 1 or more");
  for (const std::string& pattern : options.exclude) {
    TESSERA_CHECK(std::ranges::any_of(
                      linears, [&](const Found& each) { return matches_fqn(pattern, each.fqn); }),
                  "convert_to_fp8: the pattern '", pattern, "' matches no nn::Linear of a ",
                  root.name(), "; leave it out, or name one");
  }
}

bool is_left(const Found& found, const Fp8Options& options) {
  const auto names = [&](const std::string& pattern) { return matches_fqn(pattern, found.fqn); };
  return std::ranges::any_of(options.exclude, names) ||
         found.linear->in_features() % options.multiple_of != 0 ||
         found.linear->out_features() % options.multiple_of != 0 ||
         found.linear->weight.slot()->owners().size() > 1;
}

at::Tensor fp8_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor y = tessera::detail::fp8_linear(x, weight);
  return bias.defined() ? y.add(bias) : y;
}

}  // namespace

Fp8Conversion convert_to_fp8(ModuleBase& module, const Fp8Options& options) {
  const std::vector<Found> linears = linears_below(module);
  check_patterns(linears, options, module);
  std::ranges::for_each(linears, check_convertible);
  Fp8Conversion conversion;
  for (const Found& each : linears) {
    if (is_left(each, options)) {
      conversion.left.push_back(each.fqn);
      continue;
    }
    conversion.converted.push_back(each.fqn);
    each.linear->attach(std::make_shared<Fp8Mark>());
    each.linear->set_product(fp8_product);
  }
  return conversion;
}

bool is_fp8(const Linear& linear) {
  return linear.attached<Fp8Mark>() != nullptr;
}

NamedSlots fp8_weights(const ModuleBase& module) {
  NamedSlots weights;
  for (const Found& each : linears_below(module)) {
    if (is_fp8(*each.linear)) {
      weights.emplace_back(join_fqn(each.fqn, "weight"), each.linear->weight.slot());
    }
  }
  return weights;
}

}  // namespace tessera::nn

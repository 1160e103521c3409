#include "tessera/nn/fp8.h"

#include <algorithm>
#include <memory>

#include "linears_below.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace {

using detail::NamedLinear;

/// Attached to a Linear. Styles of parallelism, which set a product of their own, look for it.
struct Fp8Mark {};

void check_convertible(const NamedLinear& found) {
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

void check_patterns(const std::vector<NamedLinear>& linears, const Fp8Options& options,
                    const ModuleBase& root) {
  TESSERA_CHECK(options.multiple_of >= 1, "convert_to_fp8: multiple_of is ", options.multiple_of,
                "; it must be 1 or more");
  detail::check_each_matches("convert_to_fp8", options.exclude, linears, root,
                             "leave it out, or name one");
}

bool is_left(const NamedLinear& found, const Fp8Options& options) {
  return found.is_named_by(options.exclude) ||
         found.linear->in_features() % options.multiple_of != 0 ||
         found.linear->out_features() % options.multiple_of != 0 ||
         found.linear->weight.slot()->owners().size() > 1;
}

}  // namespace

at::Tensor detail::fp8_product(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias) {
  const at::Tensor y = tessera::detail::fp8_linear(x, weight);
  return bias.defined() ? y.add(bias) : y;
}

Fp8Conversion convert_to_fp8(ModuleBase& module, const Fp8Options& options) {
  const std::vector<NamedLinear> linears = detail::linears_below(module);
  check_patterns(linears, options, module);
  std::ranges::for_each(linears, check_convertible);
  Fp8Conversion conversion;
  for (const NamedLinear& each : linears) {
    if (is_left(each, options)) {
      conversion.left.push_back(each.fqn);
      continue;
    }
    conversion.converted.push_back(each.fqn);
    each.linear->attach(std::make_shared<Fp8Mark>());
    each.linear->set_product(detail::fp8_product);
  }
  return conversion;
}

bool is_fp8(const Linear& linear) {
  return linear.attached<Fp8Mark>() != nullptr;
}

NamedSlots fp8_weights(const ModuleBase& module) {
  NamedSlots weights;
  for (const NamedLinear& each : detail::linears_below(module)) {
    if (is_fp8(*each.linear)) {
      weights.emplace_back(join_fqn(each.fqn, "weight"), each.linear->weight.slot());
    }
  }
  return weights;
}

}  // namespace tessera::nn

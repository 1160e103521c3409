// Plans that module classes declare, put together for a model.

#include "tessera/tensor_parallel/declared_plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/visit_modules.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {

ParallelizePlan declared_plan(const nn::ModuleBase& module, const DeviceMesh& mesh,
                              const DeclaredPlanOptions& options) {
  ParallelizePlan plan;
  std::vector<std::string> declared;
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    const bool spoken_for = std::ranges::any_of(declared, [&fqn](const std::string& outer) {
      return outer.empty() || fqn.starts_with(outer + ".");
    });
    const auto* declares = dynamic_cast<const DeclaresPlan*>(&each);
    if (spoken_for || declares == nullptr) {
      return;
    }
    declared.push_back(fqn);
    for (const auto& [pattern, style] : declares->tensor_parallel_plan(mesh, options)) {
      plan.emplace_back(pattern.empty() ? fqn : nn::join_fqn(fqn, pattern), style);
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

}  // namespace tessera::tensor_parallel

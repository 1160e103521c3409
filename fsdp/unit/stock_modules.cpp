#include "unit/stock_modules.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <string>

#include "tessera/core/error.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/visit_modules.h"
#include "unit/attached_units.h"

namespace tessera::fsdp {
namespace {

/// What nn::Hooked holds; any other module itself.
const torch::nn::Module& held_or_own(const torch::nn::Module& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  return holder == nullptr ? module : holder->adopted_module();
}

bool makes_sparse_gradients(const torch::nn::Module& module) {
  const auto* embedding = module.as<torch::nn::Embedding>();
  const auto* bag = module.as<torch::nn::EmbeddingBag>();
  return (embedding != nullptr && embedding->options.sparse()) ||
         (bag != nullptr && bag->options.sparse());
}

/// In eval mode it takes the running ones, if it has them.
template <class Norm>
bool is_batch_norm(const torch::nn::Module& module) {
  const auto* norm = module.as<Norm>();
  return norm != nullptr && (norm->is_training() || !norm->options.track_running_stats());
}

bool takes_batch_statistics(const torch::nn::Module& module) {
  const torch::nn::Module& own = held_or_own(module);
  return is_batch_norm<torch::nn::BatchNorm1d>(own) || is_batch_norm<torch::nn::BatchNorm2d>(own) ||
         is_batch_norm<torch::nn::BatchNorm3d>(own);
}

}  // namespace

void refuse_sparse_gradients(const nn::NamedSlots& parameters) {
  for (const auto& [name, slot] : parameters) {
    for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
      TESSERA_CHECK(!makes_sparse_gradients(held_or_own(*owner.module)), "fully_shard: parameter '",
                    name, "' of a ", owner.module->name(),
                    " gets sparse gradients, which cannot be reduced over ranks; make the module "
                    "without sparse(true), or name the parameter in Options::ignored");
    }
  }
}

void warn_of_batch_norm(const nn::ModuleBase& root, std::int64_t ranks) {
  std::string found;
  const auto note = [&](const std::string& fqn, const torch::nn::Module& module) {
    if (found.empty() && takes_batch_statistics(module)) {
      found = tessera::detail::concat(fqn.empty() ? "the unit itself" : "'" + fqn + "'", ", a ",
                                      module.name());
    }
  };
  nn::visit_modules(root, note, outside_of_units());
  if (ranks > 1 && !found.empty()) {
    TORCH_WARN(
        found, ", takes its statistics in training from this rank's part of the batch, and ",
        "its running ones differ from rank to rank: numbers depend on how many ranks there ",
        "are; take a norm of each sample (LayerNorm, RMSNorm, GroupNorm), or freeze it with ",
        "eval()");
  }
}

}  // namespace tessera::fsdp

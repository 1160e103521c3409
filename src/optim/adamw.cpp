#include "tessera/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

bool is_fraction(double beta) {
  return beta >= 0.0 && beta < 1.0;
}

void check(const AdamWOptions& options) {
  TESSERA_CHECK(is_fraction(options.beta1) && is_fraction(options.beta2) && options.eps >= 0.0 &&
                    options.lr >= 0.0 && options.weight_decay >= 0.0,
                "AdamW with lr ", options.lr, ", betas ", options.beta1, " and ", options.beta2,
                ", eps ", options.eps, ", weight decay ", options.weight_decay,
                " was asked for; betas must be in [0, 1), the others not negative");
}

}  // namespace

AdamW::AdamW(std::vector<Group<AdamWOptions>> groups)
    : GroupedOptimizer(std::move(groups), {"exp_avg", "exp_avg_sq"}, /*counts_steps=*/true) {
  for (std::size_t i = 0; i < this->groups(); ++i) check(options(i));
}

AdamW::AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options)
    : AdamW(std::vector<Group<AdamWOptions>>{{std::move(parameters), options}}) {}

AdamW::AdamW(const nn::ModuleBase& module, AdamWOptions options)
    : AdamW(slots_of(module), options) {}

void AdamW::update_shards(const std::vector<ShardUpdate>& shards, double factor) {
  for (std::size_t group = 0; group < groups(); ++group) {
    const AdamWOptions& o = options(group);
    for_each_batch(shards, group, factor, [&](const Batch& batch) {
      at::_fused_adamw_(batch.parameters, batch.gradients, batch.states[0], batch.states[1],
                        /*max_exp_avg_sqs=*/{}, batch.steps, lr(group), o.beta1, o.beta2,
                        o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false);
    });
  }
}

}  // namespace tessera::optim

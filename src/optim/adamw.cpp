// AdamW: options, checks, and one call of libtorch's fused kernel for a batch. All else is in
// SlotOptimizer and BatchedOptimizer.
#include "tessera/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

/// False for NaN as well.
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

/// The state has the names that it has in torch.optim.AdamW.
AdamW::AdamW(std::vector<Group<AdamWOptions>> groups)
    : GroupedOptimizer(std::move(groups), {"exp_avg", "exp_avg_sq"}, /*counts_steps=*/true) {
  for (std::size_t i = 0; i < this->groups(); ++i) {
    check(options(i));
  }
}

AdamW::AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options)
    : AdamW(std::vector<Group<AdamWOptions>>{{std::move(parameters), options}}) {}

AdamW::AdamW(const nn::ModuleBase& module, AdamWOptions options)
    : AdamW(slots_of(module), options) {}

/// The kernel reads the step from the device, so that the host does not wait for it. Steps are
/// counted before (BatchedOptimizer::count_step): it wants the step now made, from 1.
void AdamW::update_batch(const Batch& batch, std::size_t group) {
  const AdamWOptions& o = options(group);
  at::_fused_adamw_(batch.parameters, batch.gradients, batch.states[0], batch.states[1],
                    /*max_exp_avg_sqs=*/{}, batch.steps, lr(group), o.beta1, o.beta2,
                    o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::optim

// SGD by libtorch's fused kernel. The shortest optimizer of the library, and a pattern for others
// (docs/contributing.md).
#include "tessera/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

/// State is made for all groups or for none, so that all batches have equally many lists.
std::vector<std::string> state_names(const std::vector<Group<SgdOptions>>& groups) {
  const bool momentum = std::ranges::any_of(
      groups, [](const Group<SgdOptions>& group) { return group.options.momentum != 0.0; });
  return momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

void check(const SgdOptions& options) {
  TESSERA_CHECK(options.lr >= 0.0 && options.momentum >= 0.0 && options.weight_decay >= 0.0,
                "SGD with lr ", options.lr, ", momentum ", options.momentum, ", weight decay ",
                options.weight_decay, " was asked for; none may be negative");
  TESSERA_CHECK(!options.nesterov || options.momentum > 0.0,
                "SGD with Nesterov's momentum was asked for, but without momentum; give both");
}

}  // namespace

Sgd::Sgd(std::vector<Group<SgdOptions>> groups)
    : GroupedOptimizer(groups, state_names(groups), /*counts_steps=*/false) {
  for (std::size_t i = 0; i < this->groups(); ++i) {
    check(options(i));
  }
}

Sgd::Sgd(std::vector<nn::SlotPtr> parameters, SgdOptions options)
    : Sgd(std::vector<Group<SgdOptions>>{{std::move(parameters), options}}) {}

Sgd::Sgd(const nn::ModuleBase& module, SgdOptions options) : Sgd(slots_of(module), options) {}

void Sgd::update_batch(const Batch& batch, std::size_t group) {
  const SgdOptions& o = options(group);
  const bool momentum = o.momentum != 0.0;
  // Options may be changed between steps; state names may not.
  TESSERA_CHECK(!momentum || !batch.states.empty(),
                "SGD was made without momentum, which a group got since; make it with it");
  // Buffers begin as zeros, so that the first step is like the others.
  at::_fused_sgd_(batch.parameters, batch.gradients,
                  momentum ? at::TensorList(batch.states[0]) : at::TensorList(), o.weight_decay,
                  o.momentum, lr(group), /*dampening=*/0.0, o.nesterov, /*maximize=*/false,
                  /*is_first_step=*/false);
}

}  // namespace tessera::optim

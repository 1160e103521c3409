// The optimizers AdamW and SGD: options, checks, and one fused kernel call for many shards.

#include "tessera/optim/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "local_shards.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/random.h"
#include "tessera/kernels/detail/lists.h"

namespace tessera::optim {
namespace {

bool is_fraction(double beta) {
  return beta >= 0.0 && beta < 1.0;
}

bool rounds(const AdamWOptions& options) {
  return options.moment_dtype == c10::ScalarType::BFloat16;
}

void check(const AdamWOptions& options) {
  TESSERA_CHECK(is_fraction(options.beta1) && is_fraction(options.beta2) && options.eps >= 0.0 &&
                    options.lr >= 0.0 && options.weight_decay >= 0.0,
                "AdamW with lr ", options.lr, ", betas ", options.beta1, " and ", options.beta2,
                ", eps ", options.eps, ", weight decay ", options.weight_decay,
                " is invalid; betas must be in [0, 1), all other values at least 0");
  TESSERA_CHECK(options.moment_dtype == c10::ScalarType::Float || rounds(options),
                "AdamW with moments in ", options.moment_dtype,
                " is invalid; moment_dtype must be Float or BFloat16");
}

bool is_narrow(const at::Tensor& moments) {
  return moments.scalar_type() == c10::ScalarType::BFloat16;
}

/// Whether kernels::adamw() updates the shards of `batch`. libtorch's kernels do not support bf16
/// moments. libtorch's kernel updates all other CPU shards, so that results keep their bits across
/// library versions.
bool is_for_kernel(const Batch& batch) {
  return is_narrow(batch.states[0][0]) || kernels::has_adamw_kernel(batch.parameters[0]);
}

/// Returns the random stream for rounding a parameter's moments (running means). The stream depends
/// on the parameter's FQN, or on the parameter's index if there is no FQN.
std::uint64_t moment_stream(const nn::ParameterSlot& slot, std::size_t index) {
  const std::string name = slot.fqn().empty() ? std::to_string(index) : slot.fqn();
  return stream_of(("optim::AdamW " + name).c_str());
}

}  // namespace

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

c10::ScalarType AdamW::state_dtype(std::size_t group, c10::ScalarType parameter) const {
  const c10::ScalarType wide = update_type(parameter);
  return wide == c10::ScalarType::Float ? options(group).moment_dtype : wide;
}

/// Shards are not joined if moments are rounded: each parameter has its own random numbers.
bool AdamW::joins_shards(std::size_t group) const {
  return !rounds(options(group));
}

bool AdamW::takes_gradient_factor(const Batch& batch, std::size_t /*group*/) const {
  return is_for_kernel(batch);
}

/// Kernels read the step number from device memory, so that the CPU does not wait. The number
/// counts from 1: SlotOptimizer::count_step has already incremented the number.
void AdamW::update_batch(const Batch& batch, std::size_t group) {
  if (is_for_kernel(batch)) {
    return update_by_kernel(batch, group);
  }
  const AdamWOptions& o = options(group);
  at::_fused_adamw_(batch.parameters, batch.gradients, batch.states[0], batch.states[1],
                    /*max_exp_avg_sqs=*/{}, batch.steps, lr(group), o.beta1, o.beta2,
                    o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void AdamW::update_by_kernel(const Batch& batch, std::size_t group) {
  const AdamWOptions& o = options(group);
  std::vector<kernels::AdamWTensors> all;
  for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
    all.push_back({.parameter = batch.parameters[i],
                   .gradient = batch.gradients[i],
                   .exp_avg = batch.states[0][i],
                   .exp_avg_sq = batch.states[1][i],
                   .step = batch.steps[i]});
    if (is_narrow(all.back().exp_avg)) {
      const std::size_t index = batch.shards[i];
      tessera::detail::RandomPlace place =
          tessera::detail::own_place(parameters()[index]->persistent());
      all.back().place = std::move(place.elements);
      all.back().local_sizes = std::move(place.local_sizes);
      all.back().stream = moment_stream(*parameters()[index], index);
    }
  }
  kernels::adamw(all, {.beta1 = o.beta1,
                       .beta2 = o.beta2,
                       .eps = o.eps,
                       .weight_decay = o.weight_decay,
                       .seed = o.seed,
                       .lr = rate_on(batch.parameters[0].device(), group),
                       .gradient_factor = batch.gradient_factor});
}

/// Returns the learning rate as a tensor on `device`. A step in a CUDA graph reads the tensor at
/// each replay.
at::Tensor AdamW::rate_on(c10::Device device, std::size_t group) {
  const double value = lr(group);
  const auto found = std::ranges::find_if(rates_, [&](const Rate& rate) {
    return rate.group == group && rate.tensor.device() == device;
  });
  if (found == rates_.end()) {
    return rates_
        .emplace_back(
            Rate{group, value, at::scalar_tensor(value, at::dtype(at::kDouble).device(device))})
        .tensor;
  }
  if (std::exchange(found->value, value) != value) {
    found->tensor.fill_(value);
  }
  return found->tensor;
}

namespace {

/// Returns the names of the state tensors. If one parameter group has momentum, all groups have
/// momentum buffers, so that all shards have equally many state tensors.
std::vector<std::string> state_names(const std::vector<Group<SgdOptions>>& groups) {
  const bool momentum = std::ranges::any_of(
      groups, [](const Group<SgdOptions>& group) { return group.options.momentum != 0.0; });
  return momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

void check(const SgdOptions& options) {
  TESSERA_CHECK(options.lr >= 0.0 && options.momentum >= 0.0 && options.weight_decay >= 0.0,
                "SGD with lr ", options.lr, ", momentum ", options.momentum, ", weight decay ",
                options.weight_decay, " is invalid; none may be negative");
  TESSERA_CHECK(!options.nesterov || options.momentum > 0.0,
                "SGD with Nesterov's momentum needs a momentum above 0");
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
  // The program can change options between steps, but cannot turn on momentum: only the constructor
  // can declare momentum buffers.
  TESSERA_CHECK(!momentum || !batch.states.empty(),
                "a group sets momentum for an SGD without momentum; make the SGD with momentum");
  // Momentum buffers start as zeros, so that the first step needs no special case.
  at::_fused_sgd_(batch.parameters, batch.gradients,
                  momentum ? at::TensorList(batch.states[0]) : at::TensorList(), o.weight_decay,
                  o.momentum, lr(group), /*dampening=*/0.0, o.nesterov, /*maximize=*/false,
                  /*is_first_step=*/false);
}

}  // namespace tessera::optim

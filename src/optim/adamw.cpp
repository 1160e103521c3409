#include "tessera/optim/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <unordered_set>
#include <utility>

#include "slot_gradient.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {
namespace {

std::vector<nn::SlotPtr> slots_below(const nn::ModuleBase& module) {
  std::vector<nn::SlotPtr> slots;
  for (auto& [name, slot] : module.named_slots()) slots.push_back(slot);
  return slots;
}

std::vector<nn::SlotPtr> without_repeats(std::vector<nn::SlotPtr> slots) {
  std::unordered_set<const nn::ParameterSlot*> seen;
  std::erase_if(slots, [&](const nn::SlotPtr& slot) { return !seen.insert(slot.get()).second; });
  return slots;
}

bool is_fraction(double beta) {
  return beta >= 0.0 && beta < 1.0;
}

}  // namespace

/// What one fused call takes: tensors of one type on one device.
struct AdamW::Batch {
  std::vector<at::Tensor> parameters, grads, exp_avgs, exp_avg_sqs, steps;

  void add(const at::Tensor& local, const at::Tensor& grad, const State& state) {
    parameters.push_back(local);
    grads.push_back(grad.to(local.scalar_type()).contiguous());
    exp_avgs.push_back(state.exp_avg);
    exp_avg_sqs.push_back(state.exp_avg_sq);
    steps.push_back(state.step);
  }
};

AdamW::AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options)
    : parameters_(without_repeats(std::move(parameters))),
      state_(parameters_.size()),
      options_(options) {
  TESSERA_CHECK(is_fraction(options.beta1) && is_fraction(options.beta2) && options.eps >= 0.0 &&
                    options.lr >= 0.0 && options.weight_decay >= 0.0,
                "AdamW with lr ", options.lr, ", betas ", options.beta1, " and ", options.beta2,
                ", eps ", options.eps, ", weight decay ", options.weight_decay,
                " was asked for; betas must be in [0, 1), the others not negative");
}

AdamW::AdamW(const nn::ModuleBase& module, AdamWOptions options)
    : AdamW(slots_below(module), options) {}

const AdamW::State& AdamW::state_for(std::size_t index, const at::Tensor& local) {
  State& state = state_[index];
  if (!state.exp_avg.defined()) {
    state.exp_avg = at::zeros_like(local);
    state.exp_avg_sq = at::zeros_like(local);
    state.step = at::zeros({}, local.options().dtype(c10::ScalarType::Float));
  }
  TESSERA_CHECK(state.exp_avg.sizes() == local.sizes(), "the local shard of a parameter has sizes ",
                local.sizes(), " but had ", state.exp_avg.sizes(),
                " when AdamW first updated it; apply TP and FSDP before the first step");
  return state;
}

void AdamW::step() {
  const c10::AutoGradMode no_grad(false);
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor grad = slot_gradient(*parameters_[i]);
    if (!grad.defined()) continue;
    TESSERA_CHECK(parameters_[i]->initialized(), "AdamW was to update a parameter of sizes ",
                  parameters_[i]->persistent().sizes(),
                  " that nobody has filled; call nn::init_weights or load values first");
    const at::Tensor local = local_tensor(parameters_[i]->persistent()).detach();
    const State& state = state_for(i, local);
    if (local.numel() > 0) batch_for(batches, local).add(local, local_tensor(grad), state);
  }
  for (const Batch& batch : batches) update(batch);
}

AdamW::Batch& AdamW::batch_for(std::vector<Batch>& batches, const at::Tensor& local) {
  for (Batch& batch : batches) {
    const at::Tensor& first = batch.parameters[0];
    if (first.device() == local.device() && first.scalar_type() == local.scalar_type()) {
      return batch;
    }
  }
  return batches.emplace_back();
}

void AdamW::update(const Batch& batch) const {
  at::_foreach_add_(batch.steps, 1);
  at::_fused_adamw_(batch.parameters, batch.grads, batch.exp_avgs, batch.exp_avg_sqs,
                    /*max_exp_avg_sqs=*/{}, batch.steps, options_.lr, options_.beta1,
                    options_.beta2, options_.weight_decay, options_.eps, /*amsgrad=*/false,
                    /*maximize=*/false);
}

void AdamW::zero_grad() {
  for (const nn::SlotPtr& slot : parameters_) {
    slot->persistent().mutable_grad().reset();
    slot->get().mutable_grad().reset();
  }
}

}  // namespace tessera::optim

// The tensors of one parameter: how its shard is cut and takes the place of the original in the
// slot, how the unsharded tensor is shown in forward and backward, and how a reduced gradient
// reaches the shard. Nothing here is collective except take_gradient().

#include "parameter/sharded_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/nn/detail/retired_parameter.h"

namespace tessera::fsdp {
namespace {

/// This rank's rows on `device`, in memory of their own, so that the unsharded tensor can be freed.
at::Tensor cut(const at::Tensor& local, const ShardShape& shape, std::int64_t rank,
               c10::Device device) {
  if (shape.ranks == 1 || !shape.dim) {
    return local.contiguous().to(local.is_meta() ? local.device() : device);
  }
  // A clone even where the slice is contiguous: a view would keep the whole parameter alive.
  const at::Tensor rows = shape.rows_of(local, rank);
  const at::Tensor own = local.is_meta() || local.device() == device
                             ? rows.clone(at::MemoryFormat::Contiguous)
                             : rows.contiguous().to(device);
  return own.view(shape.shard_sizes(rank));
}

/// nullopt: of a plain tensor.
std::optional<ShardingSpec> spec_of(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? std::optional(sharding_spec(tensor)) : std::nullopt;
}

/// 0 for a tensor made in inference mode, which counts nothing.
std::uint64_t version_of(const at::Tensor& tensor) {
  // current_version() throws for a tensor without a counter.
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

}  // namespace

ShardedParameter::ShardedParameter(const ParameterSpec& spec)
    : slot_(spec.slot),
      name_(spec.name),
      shape_{local_tensor(slot_->get()).sizes().vec(), spec.dim, spec.mesh.shard.size(),
             spec.parts},
      home_(spec.home),
      extension_(spec.extension),
      unsharded_spec_(spec_of(slot_->get())),
      pending_sum_(unsharded_spec_) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& original = slot_->get();
  const at::Tensor shard =
      cut(local_tensor(original).detach(), shape_, spec.mesh.shard.local_rank(), home_.device);
  sharded_ = make_distributed(shard, spec.sharding, original.sizes().vec());
  sharded_.requires_grad_(original.requires_grad());
  // Whoever still holds the original would train values that nobody reads.
  nn::retire_parameter(original, "fully_shard");
  slot_->set_persistent(sharded_);
  // The slot's current tensor follows its persistent one: until the first forward both are the
  // shard.
  show_sharded();
}

std::uint64_t ShardedParameter::version() const {
  // A write through the distributed tensor moves one counter, a write to its local tensor the
  // other. Both only grow, so that their sum changes with either.
  return version_of(sharded_) + version_of(shard());
}

bool ShardedParameter::is_replaced() const {
  const at::Tensor& current = slot_->get();
  return !current.is_same(sharded_) && !current.is_same(unsharded_);
}

bool ShardedParameter::adopt() {
  if (!is_replaced()) {
    return false;
  }
  const at::Tensor& current = slot_->get();
  TESSERA_CHECK(
      tessera::is_distributed(current) && current.sizes() == sharded_.sizes() &&
          sharding_spec(current) == sharding_spec(sharded_),
      "parameter '", name_, "' was replaced by a tensor that is not laid out as its shard was, ",
      to_string(*sharding_spec(sharded_).layout), " on ", to_string(sharding_spec(sharded_).mesh),
      "; copy values into slot->persistent() instead of replacing it");
  sharded_ = current;
  slot_->set_persistent(sharded_);
  return true;
}

void ShardedParameter::set_unsharded(const at::Tensor& local) {
  const c10::AutoGradMode no_grad(false);
  // Plain before fully_shard, plain in forward: users' operators see no distributed tensor.
  if (!unsharded_spec_) {
    unsharded_ = local;
    return;
  }
  unsharded_ = make_distributed(local, *unsharded_spec_, sharded_.sizes().vec());
  // What tensor parallelism has to sum is summed for all parameters together (DeferredSums).
  leave_gradient_pending(unsharded_);
}

void ShardedParameter::show_unsharded() {
  // It may have been frozen since.
  unsharded_.requires_grad_(trainable());
  slot_->swap(unsharded_);
}

void ShardedParameter::accumulate(const at::Tensor& gradient) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& sum = sharded_.mutable_grad();
  // Only the first addition since the last agreement tells whether the gradient was there before:
  // one that was stays, whoever used the parameter since.
  if (accumulation_ == Accumulation::kSettled) {
    accumulation_ = sum.defined() ? Accumulation::kAdded : Accumulation::kStarted;
  }
  if (!sum.defined()) {
    // What is still to be added was for a gradient that the program has dropped.
    arriving_.clear();
    // A view of the reduction's result where type and place agree: no copy.
    sum = make_distributed(at_home(gradient), sharding_spec(sharded_), sharded_.sizes().vec());
  } else if (home_.offloaded) {
    arriving_.push_back(at_home(gradient));
  } else {
    local_tensor(sum).add_(gradient);
  }
  awaited_ = home_.offloaded;
  if (!awaited_) {
    call_hook();
  }
}

void ShardedParameter::arrive() {
  if (!std::exchange(awaited_, false)) {
    return;
  }
  const auto arrived = std::exchange(arriving_, {});
  // The program may have dropped the gradient meanwhile.
  if (!sharded_.grad().defined()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& gradient : arrived) {
    local_tensor(sharded_.grad()).add_(gradient);
  }
  call_hook();
}

void ShardedParameter::forget_arrivals() {
  arriving_.clear();
  awaited_ = false;
}

/// An optimizer that steps within backward.
void ShardedParameter::call_hook() {
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded_)) {
    (*hook)(sharded_);
  }
}

/// In the memory and of the type of the shard.
at::Tensor ShardedParameter::at_home(const at::Tensor& gradient) const {
  at::Tensor own = gradient;
  if (home_.pinned) {
    // Into pinned memory the copy runs beside the host; CommContext::settle waits for it.
    own = at::empty(gradient.sizes(), shard().options().pinned_memory(true));
    own.copy_(gradient, /*non_blocking=*/true);
  }
  return own.to(shard().options());
}

void ShardedParameter::drop_gradient() {
  sharded_.mutable_grad().reset();
  unreduced_ = {};
  forget_arrivals();
  // True: with the gradient gone, there is nothing that a rank's answer could take away.
  settle_use(true);
}

void ShardedParameter::settle_use(bool by_any_rank) {
  if (accumulation_ == Accumulation::kStarted && !by_any_rank) {
    sharded_.mutable_grad().reset();
  }
  accumulation_ = Accumulation::kSettled;
  used_ = false;
}

UnshardedGradient take_gradient(const at::Tensor& unsharded) {
  // Taken off at once: the next backward would add to it, and what is reduced now would count
  // twice.
  const at::Tensor gradient = unsharded.grad();
  unsharded.mutable_grad().reset();
  if (!gradient.defined() || !tessera::is_distributed(unsharded)) {
    return {gradient, nullptr};
  }
  TESSERA_CHECK(tessera::is_distributed(gradient),
                "the gradient of a distributed parameter arrived as a plain tensor");
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(unsharded);
  if (from.layout == to.layout) {
    return {local_tensor(gradient), nullptr};
  }
  // Summed after the reduction, a shard instead of all, and with those of other parameters.
  if (comm::Communicator* group = detail::pending_sum_group(gradient, unsharded)) {
    return {local_tensor(gradient), group};
  }
  return {local_tensor(DistributedTensor(gradient).redistribute(to.layout)), nullptr};
}

}  // namespace tessera::fsdp

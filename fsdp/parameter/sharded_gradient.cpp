// How a reduced gradient reaches the shard of a parameter. Nothing here is collective except
// take_unsharded().

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>

#include "parameter/sharded_parameter.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {
namespace {

/// The gradient that is taken off `unsharded`, of its layout or a pending sum.
UnshardedGradient take_gradient(const at::Tensor& unsharded) {
  // Removed at once: the next backward would add to it, and the gradient reduced now would count
  // twice.
  const at::Tensor gradient = std::exchange(unsharded.mutable_grad(), at::Tensor());
  if (!gradient.defined() || !tessera::is_distributed(unsharded)) {
    return {gradient, nullptr, gradient.defined()};
  }
  TESSERA_CHECK(tessera::is_distributed(gradient),
                "the gradient of a distributed parameter arrived as a plain tensor");
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(unsharded);
  if (from.layout == to.layout) {
    return {local_tensor(gradient), nullptr, true};
  }
  // Summed after the reduction, a shard instead of all, and with those of other parameters.
  if (comm::Communicator* group = detail::pending_sum_group(gradient, unsharded)) {
    return {local_tensor(gradient), group, true};
  }
  return {local_tensor(DistributedTensor(gradient).redistribute(to.layout)), nullptr, true};
}

}  // namespace

at::Tensor& ShardedParameter::gradient_place() {
  UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr ? waiting->reduced : sharded_.mutable_grad();
}

const at::Tensor& ShardedParameter::gradient() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr ? waiting->reduced : sharded_.grad();
}

void ShardedParameter::keep(const UnshardedGradient& gradient, c10::ScalarType dtype) {
  UnreducedGradient& waiting = unreduced_gradient();
  if (!waiting.kept) {
    waiting.kept.emplace();
  }
  add_gradient(*waiting.kept, gradient, dtype);
}

bool ShardedParameter::has_kept() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr && waiting->kept;
}

UnshardedGradient ShardedParameter::take_kept() {
  UnshardedGradient sum = *std::exchange(unreduced_gradient().kept, std::nullopt);
  settle_unreduced();
  return sum;
}

/// Not where a pending sum might come: autograd would take the sum at once, maybe on this rank
/// alone. It may be of another type than the tensor: what is added to it is then converted.
void ShardedParameter::lend_kept() {
  if (!has_kept() || request_ != Request::kNone || !comes_complete_ ||
      unsharded_.grad().defined()) {
    return;
  }
  const at::Tensor& kept = unreduced(sharded_.grad())->kept->local;
  if (kept.defined()) {
    unsharded_.mutable_grad() =
        unsharded_spec_ ? make_distributed(kept, *unsharded_spec_, sharded_.sizes().vec()) : kept;
    lender_ = sharded_.grad();
  }
}

UnshardedGradient ShardedParameter::take_unsharded() {
  UnshardedGradient gradient = take_gradient(unsharded_);
  if (const at::Tensor lender = std::exchange(lender_, {}); lender.defined()) {
    TESSERA_CHECK(lender.is_same(sharded_.grad()) && has_kept(), "the gradient of ",
                  describe(*slot_),
                  " was dropped by a backward while it was added to; drop it before or after");
    if (gradient.local.defined()) {
      unreduced(lender)->kept->local.reset();
    }
  }
  return gradient;
}

void ShardedParameter::drop_unsharded() {
  lender_.reset();
  if (unsharded_.defined()) {
    unsharded_.mutable_grad().reset();
  }
}

void ShardedParameter::leave_to_replicas(const UnshardedGradient& gradient, c10::ScalarType dtype) {
  if (arrives()) {
    add_gradient(unreduced_gradient().scattered, gradient, dtype);
    settle_expected();
  }
}

bool ShardedParameter::has_left_to_replicas() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr && waiting->scattered.local.defined();
}

UnshardedGradient ShardedParameter::take_left_to_replicas() {
  if (!has_left_to_replicas()) {
    return {};
  }
  UnshardedGradient sum = std::exchange(unreduced_gradient().scattered, {});
  settle_unreduced();
  return sum;
}

void ShardedParameter::accumulate(const at::Tensor& gradient, bool used) {
  if (!arrives()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  settle_unreduced();
  at::Tensor& sum = gradient_place();
  // A new gradient begins, also where the program has dropped an earlier one.
  if (!sum.defined()) {
    accumulation_ = Accumulation::kStarted;
    used_ = false;
    // Only the first addition since the last agreement tells whether the gradient existed before:
    // an existing one stays, whichever rank used the parameter since.
  } else if (accumulation_ == Accumulation::kSettled) {
    accumulation_ = Accumulation::kAdded;
  }
  used_ |= used;
  const at::Tensor term = detail::has_hooks(sharded_) ? call_hooks(gradient) : gradient;
  if (!sum.defined()) {
    // Additions that are still pending were for a gradient that the program has dropped.
    arriving_.clear();
    // A view of the reduction's result where type and place agree: no copy.
    sum = distributed(at_home(term));
  } else if (home_.offloaded) {
    arriving_.push_back(at_home(term));
  } else {
    check_layout("the gradient", sum);
    local_tensor(sum).add_(term);
  }
  awaited_ = home_.offloaded;
  if (!awaited_) {
    settle_expected();
    call_hook();
  }
}

void ShardedParameter::arrive() {
  if (!std::exchange(awaited_, false)) {
    return;
  }
  notice_drop();
  settle_expected();
  const auto arrived = std::exchange(arriving_, {});
  // The program may have dropped the gradient meanwhile.
  if (!gradient().defined()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& term : arrived) {
    local_tensor(gradient()).add_(term);
  }
  call_hook();
}

void ShardedParameter::forget_arrivals() {
  arriving_.clear();
  awaited_ = false;
  expected_ = discarded_ = 0;
  if (UnreducedGradient* waiting = unreduced(sharded_.grad())) {
    waiting->expects = false;
    settle_unreduced();
  }
  shown_expected_ = nullptr;
}

at::Tensor ShardedParameter::distributed(const at::Tensor& shard) const {
  return make_distributed(shard, sharding_, sharded_.sizes().vec());
}

/// Autograd knows only the unsharded tensor, so it does not call the shard's hooks. The gradient
/// that the hooks return replaces this one.
at::Tensor ShardedParameter::call_hooks(const at::Tensor& gradient) const {
  at::Tensor shard = at_home(gradient);
  if (home_.pinned) {
    shard = shard.copy_(gradient);  // the host waits: hooks compute where the shard lives
  }
  const at::Tensor given = detail::call_hooks(sharded_, distributed(shard));
  check_layout("what a hook made of the gradient", given);
  return local_tensor(given);
}

void ShardedParameter::check_layout(const char* what, const at::Tensor& tensor) const {
  const bool distributed = tessera::is_distributed(tensor);
  TESSERA_CHECK(
      distributed && tensor.sizes() == sharded_.sizes() && sharding_spec(tensor) == sharding_, what,
      " of ", describe(*slot_), " is ",
      distributed ? detail::concat("laid out as ", to_string(*sharding_spec(tensor).layout),
                                   ", of sizes ", tensor.sizes())
                  : std::string("a plain tensor"),
      ", but the parameter is distributed as ", to_string(*sharding_.layout), " on ",
      to_string(sharding_.mesh), "; redistribute it to that, or copy values into the gradient");
}

/// For an optimizer that steps within backward.
void ShardedParameter::call_hook() {
  if (unreduced(sharded_.grad()) == nullptr && request_ != Request::kReturn) {
    detail::call_hook_after_grad(sharded_);
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
  forget_arrivals();
  // True: the gradient is gone, so no rank's answer could remove anything.
  settle_use(true);
}

void ShardedParameter::settle_use(bool by_any_rank) {
  if (accumulation_ == Accumulation::kStarted && !by_any_rank) {
    gradient_place().reset();
  }
  accumulation_ = Accumulation::kSettled;
  used_ = false;
}

}  // namespace tessera::fsdp

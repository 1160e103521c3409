// The tensors of one parameter: how its shard is cut and takes the place of the original in the
// slot, how the unsharded tensor is shown in forward and backward, and how a reduced gradient
// reaches the shard. Nothing here is collective except take_gradient().

#include "parameter/sharded_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/detail/retired_parameter.h"
#include "tessera/nn/module.h"

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

/// Of a slot whose tensor is about to be cut. Where that is a part already, what it is a part of;
/// 0: nobody knows.
std::int64_t origin_before_cut(const nn::ParameterSlot& slot) {
  const at::Tensor& tensor = slot.get();
  if (!slot.initialized() || tensor.is_meta()) {
    return 0;
  }
  return local_tensor(tensor).sizes() == tensor.sizes()
             ? nn::detail::origin_of_values(local_tensor(tensor).detach())
             : nn::detail::origin_of(slot);
}

}  // namespace

ShardedParameter::ShardedParameter(const ParameterSpec& spec)
    : slot_(spec.slot),
      name_(spec.name),
      shape_{local_tensor(slot_->get()).sizes().vec(), spec.dim, spec.mesh.shard.size(),
             spec.parts},
      home_(spec.home),
      extension_(spec.extension),
      sharding_(spec.sharding),
      unsharded_spec_(spec_of(slot_->get())),
      pending_sum_(unsharded_spec_) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& original = slot_->get();
  const at::Tensor shard =
      cut(local_tensor(original).detach(), shape_, spec.mesh.shard.local_rank(), home_.device);
  sharded_ = make_distributed(shard, spec.sharding, original.sizes().vec());
  sharded_.requires_grad_(original.requires_grad());
  const std::int64_t origin = shape_.dim && shape_.ranks > 1 ? origin_before_cut(*slot_) : 0;
  // Whoever still holds the original would train values that nobody reads.
  nn::retire_parameter(original, sharded_, "fully_shard");
  slot_->set_persistent(sharded_);
  if (origin != 0) {
    nn::detail::note_origin(*slot_, origin);
  }
  // The slot's current tensor follows its persistent one: until the first forward both are the
  // shard.
  show_sharded();
}

std::uint64_t ShardedParameter::version() const {
  return nn::detail::written_version(sharded_);
}

std::int64_t ShardedParameter::origin() const {
  return shape_.dim ? nn::detail::origin_of(*slot_) : 0;
}

bool ShardedParameter::is_replaced() const {
  const at::Tensor& current = slot_->get();
  return !current.is_same(sharded_) && !current.is_same(unsharded_);
}

bool ShardedParameter::adopt() {
  const bool replaced = is_replaced();
  const at::Tensor& current = replaced ? slot_->get() : sharded_;
  TESSERA_CHECK(tessera::is_distributed(current) && current.sizes() == sharded_.sizes() &&
                    sharding_spec(current) == sharding_,
                "parameter '", name_,
                "' was replaced by a tensor that is not laid out as its shard was, ",
                to_string(*sharding_.layout), " on ", to_string(sharding_.mesh),
                "; copy values into slot->persistent() instead of replacing it");
  if (!replaced) {
    return false;
  }
  sharded_ = current;
  slot_->set_persistent(sharded_);
  return true;
}

void ShardedParameter::set_stand_in(MakeStandIn make) {
  make_stand_in_ = std::move(make);
}

/// libtorch keeps its node of a leaf weakly, and makes one where there is none. A conversion takes
/// it away, since it knows the leaf's type.
void ShardedParameter::show_stand_in() {
  if (make_stand_in_ && (sharded_.is_floating_point() || sharded_.is_complex())) {
    stand_in_ = make_stand_in_(sharded_);
    torch::autograd::impl::set_grad_accumulator(sharded_, stand_in_);
  }
}

void ShardedParameter::set_unsharded(const at::Tensor& local) {
  const c10::AutoGradMode no_grad(false);
  // Plain before fully_shard, plain in forward: users' operators see no distributed tensor.
  if (!unsharded_spec_) {
    unsharded_ = local;
  } else {
    unsharded_ = make_distributed(local, *unsharded_spec_, sharded_.sizes().vec());
    // What tensor parallelism has to sum is summed for all parameters together (DeferredSums).
    leave_gradient_pending(unsharded_);
  }
  counted_version_ = version();
  show_stand_in();
}

void ShardedParameter::count_writes() {
  const std::uint64_t now = version();
  // On one rank the unsharded tensor may be a view of the shard, with whose counter it counts.
  if (std::exchange(counted_version_, now) != now &&
      !local_tensor(unsharded_).is_alias_of(shard())) {
    unsharded_.unsafeGetTensorImpl()->bump_version();
  }
}

void ShardedParameter::show_unsharded() {
  // It may have been frozen since.
  unsharded_.requires_grad_(trainable());
  slot_->swap(unsharded_);
}

UnreducedGradient& ShardedParameter::unreduced_gradient() {
  at::Tensor& gradient = sharded_.mutable_grad();
  if (unreduced(gradient) == nullptr) {
    gradient = at::detail::make_tensor<UnreducedGradient>(sharded_, gradient, describe(*slot_));
  }
  return *unreduced(gradient);
}

/// Once nothing waits, the program sees what is reduced.
void ShardedParameter::settle_unreduced() {
  at::Tensor& gradient = sharded_.mutable_grad();
  const UnreducedGradient* waiting = unreduced(gradient);
  if (waiting != nullptr && waiting->is_settled()) {
    gradient = at::Tensor(waiting->reduced);
  }
}

void ShardedParameter::expect() {
  notice_drop();
  ++expected_;
}

void ShardedParameter::show_expected() {
  notice_drop();
  if (expected_ > discarded_ || (awaited_ && gradient().defined())) {
    unreduced_gradient().expects = true;
    shown_expected_ = &unreduced_gradient();
  }
}

/// libtorch tells nobody that a gradient was dropped: it shows when the next one comes.
void ShardedParameter::notice_drop() {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  const bool expects = waiting != nullptr && waiting->expects;
  if (shown_expected_ != nullptr && !(expects && waiting == shown_expected_)) {
    shown_expected_ = nullptr;
    discarded_ = expected_;
    arriving_.clear();
  }
  TESSERA_CHECK(shown_expected_ != nullptr || !expects, "the gradient of ", describe(*slot_),
                " was put back, but it was taken away while reductions were under way that have "
                "ended since; take it away after a backward with set_is_last_backward(true)");
}

/// Whether what a reduction brings is still wanted.
bool ShardedParameter::arrives() {
  notice_drop();
  --expected_;
  if (discarded_ == 0) {
    return true;
  }
  --discarded_;
  return false;
}

void ShardedParameter::settle_expected() {
  if (shown_expected_ != nullptr && expected_ == 0 && !awaited_) {
    shown_expected_ = nullptr;
    unreduced(sharded_.grad())->expects = false;
    settle_unreduced();
  }
}

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
  // A new gradient begins, of which this is all, also where the program has dropped an earlier one.
  if (!sum.defined()) {
    accumulation_ = Accumulation::kStarted;
    used_ = false;
    // Only the first addition since the last agreement tells whether the gradient was there before:
    // one that was stays, whoever used the parameter since.
  } else if (accumulation_ == Accumulation::kSettled) {
    accumulation_ = Accumulation::kAdded;
  }
  used_ |= used;
  const at::Tensor term = has_hooks() ? call_hooks(gradient) : gradient;
  if (!sum.defined()) {
    // What is still to be added was for a gradient that the program has dropped.
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

/// Of register_hook. A hook that was taken away leaves its place in the list.
bool ShardedParameter::has_hooks() const {
  return !torch::autograd::impl::hooks(sharded_).empty();
}

/// Autograd knows the unsharded tensor alone, so that it calls none of the shard's. What hooks
/// give takes the gradient's place.
at::Tensor ShardedParameter::call_hooks(const at::Tensor& gradient) const {
  at::Tensor shard = at_home(gradient);
  if (home_.pinned) {
    shard = shard.copy_(gradient);  // the host waits: hooks compute where the shard lives
  }
  torch::autograd::variable_list gradients{distributed(shard)};
  for (const auto& hook : torch::autograd::impl::hooks(sharded_)) {
    gradients = (*hook)(gradients);
  }
  check_layout("what a hook made of the gradient", gradients.front());
  return local_tensor(gradients.front());
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

/// An optimizer that steps within backward.
void ShardedParameter::call_hook() {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded_);
  if (hook && unreduced(sharded_.grad()) == nullptr && request_ != Request::kReturn) {
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
  forget_arrivals();
  // True: with the gradient gone, there is nothing that a rank's answer could take away.
  settle_use(true);
}

void ShardedParameter::settle_use(bool by_any_rank) {
  if (accumulation_ == Accumulation::kStarted && !by_any_rank) {
    gradient_place().reset();
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

}  // namespace tessera::fsdp

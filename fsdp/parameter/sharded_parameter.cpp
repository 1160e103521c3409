// The tensors of one parameter: how its shard is cut and replaces the original in the slot, and how
// forward and backward see the unsharded tensor. Nothing here is collective.

#include "parameter/sharded_parameter.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/detail/retired_parameter.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {
namespace {

/// This rank's rows on `device`, in separate memory, so that the unsharded tensor can be freed.
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

/// The origin of a slot's values before the tensor is cut. A tensor that is a part already has the
/// origin of the whole. 0: unknown.
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
      pending_sum_(unsharded_spec_),
      comes_complete_(pending_sum_.group() == nullptr) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& original = slot_->get();
  const at::Tensor shard =
      cut(local_tensor(original).detach(), shape_, spec.mesh.shard.local_rank(), home_.device);
  sharded_ = make_distributed(shard, spec.sharding, original.sizes().vec());
  sharded_.requires_grad_(original.requires_grad());
  const std::int64_t origin = shape_.dim && shape_.ranks > 1 ? origin_before_cut(*slot_) : 0;
  // Any other holder of the original would train values that are no longer used.
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

/// libtorch holds its node of a leaf weakly, and makes one where there is none. A conversion drops
/// the node, since it knows the leaf's type.
void ShardedParameter::show_stand_in() {
  if (make_stand_in_ && (sharded_.is_floating_point() || sharded_.is_complex())) {
    stand_in_ = make_stand_in_(sharded_);
    detail::set_leaf_node(sharded_, stand_in_);
  }
}

void ShardedParameter::set_unsharded(const at::Tensor& local) {
  const c10::AutoGradMode no_grad(false);
  // Plain before fully_shard, plain in forward: users' operators see no distributed tensor.
  if (!unsharded_spec_) {
    unsharded_ = local;
  } else {
    unsharded_ = make_distributed(local, *unsharded_spec_, sharded_.sizes().vec());
    // Pending sums of tensor parallelism are taken for all parameters together (DeferredSums).
    leave_gradient_pending(unsharded_);
  }
  counted_version_ = version();
  show_stand_in();
}

void ShardedParameter::count_writes() {
  const std::uint64_t now = version();
  // On one rank the unsharded tensor may be a view of the shard, and share its version counter.
  if (std::exchange(counted_version_, now) != now &&
      !local_tensor(unsharded_).is_alias_of(shard())) {
    const std::uint64_t before = nn::detail::written_version(unsharded_);
    detail::count_write(unsharded_);
    used_version_ += nn::detail::written_version(unsharded_) - before;
  }
}

void ShardedParameter::begin_use() {
  used_version_ = nn::detail::written_version(unsharded_);
}

bool ShardedParameter::written_in_use() const {
  return nn::detail::written_version(unsharded_) != used_version_;
}

void ShardedParameter::show_unsharded() {
  // It may have been frozen since.
  unsharded_.requires_grad_(trainable());
  slot_->swap(unsharded_);
}

UnreducedGradient& ShardedParameter::unreduced_gradient() {
  at::Tensor& gradient = sharded_.mutable_grad();
  if (unreduced(gradient) == nullptr) {
    gradient = detail::make_placeholder<UnreducedGradient>(sharded_, gradient, describe(*slot_));
  }
  return *unreduced(gradient);
}

/// When no gradient waits, `.grad` is the reduced one again.
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

/// libtorch does not notify about a dropped gradient: it is noticed when the next one comes.
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

/// Whether the result of a reduction is still wanted.
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

}  // namespace tessera::fsdp

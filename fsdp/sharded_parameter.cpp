#include "sharded_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "sharded_spec.h"
#include "tessera/core/error.h"
#include "tessera/nn/retired_parameter.h"

namespace tessera::fsdp {
namespace {

/// This rank's rows on `device`, in memory of their own, so that the whole tensor can be freed.
at::Tensor cut(const at::Tensor& local, const ShardShape& shape, std::int64_t rank,
               c10::Device device) {
  if (shape.ranks == 1 || !shape.dim) {
    return local.contiguous().to(local.is_meta() ? local.device() : device);
  }
  const at::Tensor rows = local.narrow(*shape.dim, shape.first_row(rank), shape.rows(rank));
  return local.is_meta() || local.device() == device ? rows.clone(at::MemoryFormat::Contiguous)
                                                     : rows.contiguous().to(device);
}

/// 0 for a tensor made in inference mode, which counts nothing.
std::uint64_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

}  // namespace

ShardedParameter::ShardedParameter(nn::SlotPtr slot, std::string name, const DataMesh& mesh,
                                   std::optional<std::int64_t> dim, ShardHome home)
    : slot_(std::move(slot)),
      name_(std::move(name)),
      shape_{local_tensor(slot_->get()).sizes().vec(), dim, mesh.shard.size()},
      home_(home) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& original = slot_->get();
  if (tessera::is_distributed(original)) {
    whole_spec_ = sharding_spec(original);
  }
  const at::Tensor shard =
      cut(local_tensor(original).detach(), shape_, mesh.shard.local_rank(), home.device);
  sharded_ =
      make_distributed(shard, sharded_spec(original, mesh, dim, name_), original.sizes().vec());
  sharded_.requires_grad_(original.requires_grad());
  nn::retire_parameter(original, "fully_shard");
  slot_->set_persistent(sharded_);
  show_sharded();
}

std::uint64_t ShardedParameter::version() const {
  return version_of(sharded_) + version_of(shard());
}

bool ShardedParameter::is_replaced() const {
  const at::Tensor& current = slot_->get();
  return !current.is_same(sharded_) && !current.is_same(whole_);
}

bool ShardedParameter::adopt() {
  if (!is_replaced()) {
    return false;
  }
  const at::Tensor& current = slot_->get();
  TESSERA_CHECK(
      tessera::is_distributed(current) && current.sizes() == sharded_.sizes() &&
          sharding_spec(current) == sharding_spec(sharded_),
      "parameter '", name_, "' was replaced by a tensor that does not lie as its shard did, ",
      to_string(*sharding_spec(sharded_).layout), " on ", to_string(sharding_spec(sharded_).mesh),
      "; copy values into slot->persistent() instead of replacing it");
  sharded_ = current;
  slot_->set_persistent(sharded_);
  return true;
}

void ShardedParameter::set_whole(const at::Tensor& local) {
  const c10::AutoGradMode no_grad(false);
  if (!whole_spec_) {
    whole_ = local;
    return;
  }
  whole_ = make_distributed(local, *whole_spec_, sharded_.sizes().vec());
  // What tensor parallelism has to sum is summed for all parameters together (DeferredSums).
  leave_gradient_pending(whole_);
}

void ShardedParameter::show_whole() {
  whole_.requires_grad_(trainable());
  slot_->set(whole_);
}

void ShardedParameter::accumulate(const at::Tensor& gradient) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& sum = sharded_.mutable_grad();
  had_none_ |= !accumulated_ && !sum.defined();
  accumulated_ = true;
  if (sum.defined()) {
    local_tensor(sum).add_(gradient.to(home_.device));
  } else {
    sum = make_distributed(at_home(gradient), sharding_spec(sharded_), sharded_.sizes().vec());
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded_)) {
    (*hook)(sharded_);
  }
}

/// In the memory and of the type of the shard.
at::Tensor ShardedParameter::at_home(const at::Tensor& gradient) const {
  at::Tensor own = gradient;
  if (home_.pinned) {
    own = at::empty(gradient.sizes(), shard().options().pinned_memory(true));
    own.copy_(gradient, /*non_blocking=*/true);
  }
  return own.to(shard().options());
}

void ShardedParameter::drop_gradient() {
  sharded_.mutable_grad().reset();
  unreduced_ = {};
  settle_use(true);
}

void ShardedParameter::settle_use(bool by_any_rank) {
  if (had_none_ && !by_any_rank) {
    sharded_.mutable_grad().reset();
  }
  used_ = accumulated_ = had_none_ = false;
}

std::vector<Segment> segments_of(const std::vector<ShardedParameter*>& parameters) {
  std::vector<Segment> segments;
  for (const ShardedParameter* parameter : parameters) {
    segments.push_back({parameter->shape(), flat_numel(segments)});
  }
  return segments;
}

}  // namespace tessera::fsdp

#include "parameter_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

/// Whole tensors begin at multiples of this many bytes, as kernels like it.
constexpr std::int64_t kAlignment = 64;

std::int64_t align(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

c10::ScalarType compute_type(c10::ScalarType dtype, const MixedPrecisionPolicy& policy) {
  return c10::isFloatingType(dtype) ? policy.param_dtype.value_or(dtype) : dtype;
}

/// Lets `tensor` keep its identity and lie over other memory from now on.
void reseat(const at::Tensor& tensor, const at::Tensor& memory) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  impl.set_allow_tensor_metadata_change(true);
  impl.set_storage_keep_dtype(memory.storage());
  impl.set_storage_offset(memory.storage_offset());
}

}  // namespace

ParameterGroup::ParameterGroup(std::vector<ShardedParameter> parameters, DataMesh mesh,
                               const Options& options)
    : parameters_(std::move(parameters)),
      mesh_(std::move(mesh)),
      device_(mesh_.device()),
      dtype_(parameters_.front().dtype()),
      compute_dtype_(compute_type(dtype_, options.mp_policy)),
      reduce_dtype_(options.mp_policy.reduce_dtype.value_or(compute_dtype_)),
      neighbours_(mesh_.shard, options.neighbours),
      gradient_divisor_(static_cast<double>(mesh_.ranks())) {
  std::vector<ShardedParameter*> all;
  for (ShardedParameter& parameter : parameters_) {
    all.push_back(&parameter);
  }
  segments_ = segments_of(all);
}

void ParameterGroup::prepare() {
  bool changed = false;
  for (ShardedParameter& parameter : parameters_) {
    changed |= parameter.adopt();
  }
  if (!changed && laid_out()) {
    return;
  }
  reshard();
  check_devices();
  const c10::AutoGradMode no_grad(false);
  lay_out_shards();
  make_whole_tensors();
}

/// Whether the shards still lie where they were put: one that was converted or replaced does not.
bool ParameterGroup::laid_out() const {
  if (whole_locals_.empty()) {
    return false;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& shard = parameters_[i].shard();
    const at::Tensor place = shares_memory() ? whole_locals_[i]
                             : !has_flat()
                                 ? shard
                                 : shard_of(flat_, segments_[i], mesh_.shard.local_rank());
    if (shard.numel() > 0 && shard.const_data_ptr() != place.const_data_ptr()) {
      return false;
    }
  }
  return true;
}

void ParameterGroup::check_devices() const {
  std::string meta;
  for (const ShardedParameter& parameter : parameters_) {
    if (parameter.device().is_meta()) {
      meta += (meta.empty() ? "'" : ", '") + parameter.name() + "'";
    }
  }
  TESSERA_CHECK(meta.empty(), "forward of a sharded module, but its parameters ", meta,
                " are still on the meta device; call nn::to_empty and fill them first");
  const ShardHome& home = parameters_.front().home();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.device() == home.device,
                  "forward of a sharded module, but the shard of parameter '", parameter.name(),
                  "' is on ", parameter.device(), " instead of ", home.device,
                  "; create it there, for example by nn::to_empty, or change the offload_policy");
  }
}

void ParameterGroup::lay_out_shards() {
  if (!has_flat()) {
    return;
  }
  flat_ = at::zeros({flat_numel(segments_)},
                    parameters_.front().shard().options().pinned_memory(home().pinned));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = shard_of(flat_, segments_[i], mesh_.shard.local_rank());
    place.copy_(parameters_[i].shard());
    reseat(parameters_[i].shard(), place);
  }
}

void ParameterGroup::make_whole_tensors() {
  whole_locals_.clear();
  std::vector<std::int64_t> offsets{0};
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(compute_dtype_));
  for (const Segment& segment : segments_) {
    offsets.push_back(
        align(offsets.back() + itemsize * c10::multiply_integers(segment.shape.sizes)));
  }
  // A whole number of aligned pieces for the neighbours.
  const std::int64_t unit = kAlignment * neighbours_.count();
  const std::int64_t bytes = (offsets.back() + unit - 1) / unit * unit;
  whole_storage_ = ReusableStorage(bytes, device_);
  whole_flat_ = whole_storage_.tensor({bytes / itemsize}, compute_dtype_, 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    whole_locals_.push_back(shares_memory() ? parameters_[i].shard().detach()
                                            : whole_storage_.tensor(segments_[i].shape.sizes,
                                                                    compute_dtype_, offsets[i]));
    parameters_[i].set_whole(whole_locals_[i]);
  }
}

void ParameterGroup::start_unshard() {
  if (unsharded_ || gather_ != nullptr || mesh_.shard.size() == 1) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  if (neighbours_.kept()) {
    whole_storage_.allocate();
    gather_ = neighbours_.start_gather(whole_flat_);
    return;
  }
  send_ = flat_.to(device_, compute_dtype_, /*non_blocking=*/true);
  gathered_ = at::empty({mesh_.shard.size(), flat_.numel()}, send_.options());
  gather_ = mesh_.shard.group().all_gather(gathered_, send_);
}

void ParameterGroup::unshard() {
  if (unsharded_) {
    return;
  }
  start_unshard();
  fill_whole_tensors();
  for (ShardedParameter& parameter : parameters_) {
    parameter.show_whole();
  }
  unsharded_ = true;
}

void ParameterGroup::wait_for_gather() {
  if (gather_ != nullptr) {
    std::exchange(gather_, nullptr)->wait();
    send_.reset();
    neighbours_.drop();
  }
}

void ParameterGroup::fill_whole_tensors() {
  if (shares_memory()) {
    return;
  }
  wait_for_gather();
  if (whole_storage_.allocated()) {  // gathered among neighbours, in place
    return;
  }
  whole_storage_.allocate();
  // The same values under new memory: autograd must not take this for a change.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (mesh_.shard.size() > 1) {
    unpack(std::exchange(gathered_, {}), segments_, whole_locals_);
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    whole_locals_[i].copy_(parameters_[i].shard(), /*non_blocking=*/true);
  }
}

void ParameterGroup::show_sharded() {
  if (unsharded_) {
    for (ShardedParameter& parameter : parameters_) {
      parameter.show_sharded();
    }
    unsharded_ = false;
  }
}

void ParameterGroup::reshard() {
  show_sharded();
  wait_for_gather();  // one that was prefetched, but not used
  neighbours_.drop();
  gathered_.reset();
  if (whole_storage_.allocated()) {
    whole_storage_.free();
  }
}

void ParameterGroup::reshard_after_forward() {
  if (unsharded_ && neighbours_.count() > 1 && !shares_memory()) {
    const c10::AutoGradMode no_grad(false);
    neighbours_.keep(whole_flat_);
    show_sharded();
    whole_storage_.free();
  } else {
    reshard();
  }
}

bool ParameterGroup::has_gradients() const {
  return std::ranges::any_of(parameters_, [](const ShardedParameter& parameter) {
    return parameter.whole().defined() && parameter.whole().grad().defined();
  });
}

void ParameterGroup::keep_gradients() {
  const c10::AutoGradMode no_grad(false);
  kept_gradients_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    add_gradient(kept_gradients_[i], take_gradient(parameters_[i].whole()), reduce_dtype_);
  }
}

void ParameterGroup::start_reduce() {
  if (!kept_gradients_.empty()) {
    keep_gradients();
  }
  std::vector<ShardedParameter*> trainable;
  std::vector<WholeGradient> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].trainable()) {
      trainable.push_back(&parameters_[i]);
      gradients.push_back(kept_gradients_.empty() ? take_gradient(parameters_[i].whole())
                                                  : std::move(kept_gradients_[i]));
    }
  }
  kept_gradients_.clear();
  if (!trainable.empty()) {
    reduction_.emplace(std::move(trainable), std::move(gradients), mesh_, reduce_dtype_,
                       gradient_divisor_);
  }
}

void ParameterGroup::finish_reduce(DeferredSums& sums) {
  if (reduction_) {
    reduction_->finish(sums);
    reduction_.reset();
  }
}

}  // namespace tessera::fsdp

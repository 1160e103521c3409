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

ParameterGroup::ParameterGroup(std::vector<ShardedParameter> parameters, DeviceMesh mesh,
                               const MixedPrecisionPolicy& policy)
    : parameters_(std::move(parameters)),
      mesh_(std::move(mesh)),
      dtype_(parameters_.front().dtype()),
      compute_dtype_(compute_type(dtype_, policy)),
      reduce_dtype_(policy.reduce_dtype.value_or(compute_dtype_)) {
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
  check_not_meta();
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
                             : mesh_.size() == 1
                                 ? shard
                                 : shard_of(flat_, segments_[i], mesh_.local_rank());
    if (shard.numel() > 0 && shard.const_data_ptr() != place.const_data_ptr()) {
      return false;
    }
  }
  return true;
}

void ParameterGroup::check_not_meta() const {
  std::string names;
  for (const ShardedParameter& parameter : parameters_) {
    if (parameter.device().is_meta()) {
      names += (names.empty() ? "'" : ", '") + parameter.name() + "'";
    }
  }
  TESSERA_CHECK(names.empty(), "forward of a sharded module, but its parameters ", names,
                " are still on the meta device; call nn::to_empty and fill them first");
}

void ParameterGroup::lay_out_shards() {
  if (mesh_.size() == 1) {
    return;
  }
  flat_ = at::zeros({flat_numel(segments_)}, parameters_.front().shard().options());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = shard_of(flat_, segments_[i], mesh_.local_rank());
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
  whole_storage_ = ReusableStorage(offsets.back(), parameters_.front().device());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    whole_locals_.push_back(shares_memory() ? parameters_[i].shard().detach()
                                            : whole_storage_.tensor(segments_[i].shape.sizes,
                                                                    compute_dtype_, offsets[i]));
    parameters_[i].set_whole(whole_locals_[i]);
  }
}

void ParameterGroup::start_unshard() {
  if (unsharded_ || gather_ != nullptr || mesh_.size() == 1) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  send_ = flat_.to(compute_dtype_);
  gathered_ = at::empty({mesh_.size(), flat_.numel()}, send_.options());
  gather_ = mesh_.group().all_gather(gathered_, send_);
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

void ParameterGroup::fill_whole_tensors() {
  if (shares_memory()) {
    return;
  }
  if (gather_ != nullptr) {
    std::exchange(gather_, nullptr)->wait();
    send_.reset();
  }
  whole_storage_.allocate();
  // The same values under new memory: autograd must not take this for a change.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (mesh_.size() > 1) {
    unpack(std::exchange(gathered_, {}), segments_, whole_locals_);
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    whole_locals_[i].copy_(parameters_[i].shard());
  }
}

void ParameterGroup::reshard() {
  if (gather_ != nullptr) {  // prefetched, but not used
    std::exchange(gather_, nullptr)->wait();
    send_.reset();
    gathered_.reset();
  }
  if (!unsharded_) {
    return;
  }
  for (ShardedParameter& parameter : parameters_) {
    parameter.show_sharded();
  }
  if (!shares_memory()) {
    whole_storage_.free();
  }
  unsharded_ = false;
}

bool ParameterGroup::has_gradients() const {
  return std::ranges::any_of(parameters_, [](const ShardedParameter& parameter) {
    return parameter.whole().defined() && parameter.whole().grad().defined();
  });
}

void ParameterGroup::start_reduce() {
  std::vector<ShardedParameter*> trainable;
  for (ShardedParameter& parameter : parameters_) {
    if (parameter.trainable()) {
      trainable.push_back(&parameter);
    }
  }
  if (!trainable.empty()) {
    reduction_.emplace(std::move(trainable), mesh_, reduce_dtype_);
  }
}

void ParameterGroup::finish_reduce(DeferredSums& sums) {
  if (reduction_) {
    reduction_->finish(sums);
    reduction_.reset();
  }
}

}  // namespace tessera::fsdp

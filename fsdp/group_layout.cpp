// How the shards and the whole tensors of a ParameterGroup lie in memory.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <string>

#include "parameter_group.h"
#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

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

void ParameterGroup::prepare(Communication& communication) {
  bool changed = false;
  for (ShardedParameter& parameter : parameters_) {
    changed |= parameter.adopt();
  }
  if (!changed && laid_out()) {
    return;
  }
  reshard(communication);
  check_devices();
  take_types();
  const c10::AutoGradMode no_grad(false);
  lay_out_shards();
  make_whole_tensors();
  // What was copied comes before the gather that sends it.
  choose_lane(communication);
  follow_compute(communication);
}

/// Whether the shards still lie where they were put: one that was converted or replaced does not.
bool ParameterGroup::laid_out() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].whole().defined()) {
      return false;
    }
    const at::Tensor& shard = parameters_[i].shard();
    const at::Tensor place = shares_memory() ? local_tensor(parameters_[i].whole())
                             : has_flat() ? shard_of(flat_, segments_[i], mesh_.shard.local_rank())
                                          : shard;
    if (shard.numel() > 0 && shard.const_data_ptr() != place.const_data_ptr()) {
      return false;
    }
  }
  return true;
}

void ParameterGroup::take_types() {
  dtype_ = parameters_.front().dtype();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.dtype() == dtype_, "forward of a sharded module, but parameter '",
                  parameter.name(), "' is ", parameter.dtype(), " and '",
                  parameters_.front().name(), "' ", dtype_,
                  ", which were of one type when they were sharded; convert both, or before "
                  "fully_shard");
  }
  compute_dtype_ = compute_type(dtype_, mp_policy_);
  reduce_dtype_ = mp_policy_.reduce_dtype.value_or(compute_dtype_);
  if (mesh_.shard.size() > 1) {
    encoded_ = EncodedGather::of(all_parameters(), extension_, compute_dtype_);
  }
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
  if (!shares_memory()) {
    whole_ =
        WholeTensors(segments_, compute_dtype_, device_, gathers_in_place(), neighbours_.count());
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_whole(shares_memory() ? parameters_[i].shard().detach()
                                             : whole_.tensors()[i]);
  }
}

}  // namespace tessera::fsdp

#include "parameter_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "unit_tag.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;
using comm::LaneScope;

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

/// Calls or waits for a gather; where ranks disagree, says what that means here.
template <class Act>
void gathering(Act&& act) {
  try {
    act();
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail(error.what(), "; a unit that only some ranks run needs Options::may_be_unused");
  }
}

}  // namespace

ParameterGroup::ParameterGroup(std::vector<ShardedParameter> parameters, DataMesh mesh,
                               const Options& options, std::shared_ptr<const CollectiveHooks> hooks)
    : parameters_(std::move(parameters)),
      mesh_(std::move(mesh)),
      device_(mesh_.device()),
      dtype_(parameters_.front().dtype()),
      compute_dtype_(compute_type(dtype_, options.mp_policy)),
      reduce_dtype_(options.mp_policy.reduce_dtype.value_or(compute_dtype_)),
      hooks_(std::move(hooks)),
      neighbours_(mesh_.shard, options.neighbours),
      gradient_divisor_(static_cast<double>(mesh_.ranks())) {
  std::vector<ShardedParameter*> all;
  for (ShardedParameter& parameter : parameters_) {
    all.push_back(&parameter);
  }
  segments_ = segments_of(all);
  if (mesh_.shard.size() > 1) {
    encoded_ = EncodedGather::of(all, options.all_gather_extension, compute_dtype_);
  }
}

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
  const c10::AutoGradMode no_grad(false);
  lay_out_shards();
  make_whole_tensors();
  // What was copied comes before the gather that sends it.
  communication.streams().order(Lane::kCompute, Lane::kAllGather);
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

/// What is sent says of which unit it is, where the communicator does not compare calls.
bool ParameterGroup::tagged() const {
  const DeviceMesh& mesh = mesh_.shard.size() > 1 ? mesh_.shard : mesh_.replicate;
  return device_.is_cpu() && mesh_.ranks() > 1 && !mesh.group().compares_calls();
}

void ParameterGroup::lay_out_shards() {
  if (!has_flat()) {
    return;
  }
  tag_numel_ = mesh_.shard.size() > 1 && tagged() ? kTagNumel : 0;
  flat_ = at::zeros({flat_numel(segments_) + tag_numel_},
                    parameters_.front().shard().options().pinned_memory(home().pinned));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = shard_of(flat_, segments_[i], mesh_.shard.local_rank());
    place.copy_(parameters_[i].shard());
    reseat(parameters_[i].shard(), place);
  }
}

bool ParameterGroup::gathers_in_place() const {
  const bool rows = std::ranges::all_of(
      segments_, [](const Segment& segment) { return segment.shape.dim == std::int64_t{0}; });
  return rows && mesh_.shard.size() > 1 && !hooks_->all_gather && !encoded_ &&
         mesh_.shard.group().moves_groups_in_place();
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

void ParameterGroup::start_unshard(Communication& communication) {
  const bool started = gather_ != nullptr || gathered_ || whole_.allocated();
  if (unsharded_ || started || mesh_.shard.size() == 1) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  communication.streams().note("all_gather " + label_);
  const LaneScope lane(communication.streams(), Lane::kAllGather);
  const comm::PurposeScope purpose(mesh_.shard.group(), label_);
  if (neighbours_.kept()) {
    whole_.allocate();
    gather_ = neighbours_.start_gather(whole_.flat());
    return;
  }
  if (tag_numel_ > 0) {
    flat_.narrow(0, flat_.numel() - tag_numel_, tag_numel_).copy_(tag_of(label_));
  }
  send_ = encoded_ ? encode_shards() : flat_.to(device_, compute_dtype_, /*non_blocking=*/true);
  const bool in_place = !whole_.padded().empty() && !hooks_->all_gather;
  try {
    gathering([&] { in_place ? start_gather_in_place() : start_gather_packed(communication); });
  } catch (...) {
    discard_gather();
    throw;
  }
}

at::Tensor ParameterGroup::encode_shards() {
  std::vector<at::Tensor> shards;
  for (const ShardedParameter& parameter : parameters_) {
    shards.push_back(parameter.shard().to(device_, /*non_blocking=*/true));
  }
  return encoded_->encode(shards, tag_numel_ > 0 ? tag_of(label_) : at::Tensor());
}

void ParameterGroup::start_gather_in_place() {
  whole_.allocate();
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const std::int64_t numel = segments_[i].shape.padded_numel();
    if (numel > 0) {
      inputs.push_back(send_.narrow(0, segments_[i].offset, numel));
      outputs.push_back(whole_.padded()[i]);
    }
  }
  if (!inputs.empty()) {
    gather_ = mesh_.shard.group().all_gather_group(outputs, inputs);
  }
}

void ParameterGroup::start_gather_packed(Communication& communication) {
  comm::Communicator& group = mesh_.shard.group();
  gathered_ = communication.pool().acquire(group.size() * send_.numel(), send_.scalar_type(),
                                           Lane::kAllGather);
  const at::Tensor output = gathered_->tensor.view({group.size(), send_.numel()});
  gather_ = hooks_->all_gather ? hooks_->all_gather(group, output, send_)
                               : group.all_gather(output, send_);
}

void ParameterGroup::unshard(Communication& communication) {
  if (unsharded_) {
    return;
  }
  start_unshard(communication);
  communication.streams().note("unshard " + label_);
  try {
    fill_whole_tensors(communication);
  } catch (...) {
    discard_gather();
    throw;
  }
  for (ShardedParameter& parameter : parameters_) {
    parameter.show_whole();
  }
  unsharded_ = true;
}

/// The all-gather lane waits as well as the compute lane: what the collective has read is its own.
void ParameterGroup::wait_for_gather(Communication& communication) {
  if (mesh_.shard.size() == 1) {
    return;
  }
  {
    const LaneScope lane(communication.streams(), Lane::kAllGather);
    if (gather_ != nullptr) {
      try {
        gathering([work = std::exchange(gather_, nullptr)] { work->wait(); });
      } catch (...) {
        discard_gather();
        throw;
      }
    }
    send_.reset();
    neighbours_.drop();
  }
  communication.streams().order(Lane::kAllGather, Lane::kCompute);
}

/// One that failed: nobody may take its buffers for values.
void ParameterGroup::discard_gather() {
  gather_ = nullptr;
  send_.reset();
  neighbours_.drop();
  gathered_.reset();
  whole_.free();
}

/// Where the communicator does not compare what the ranks call.
void ParameterGroup::check_tags(const at::Tensor& gathered) const {
  if (tag_numel_ == 0) {
    return;
  }
  const at::Tensor tags = gathered.narrow(1, gathered.size(1) - tag_numel_, tag_numel_);
  for (std::int64_t rank = 0; rank < tags.size(0); ++rank) {
    TESSERA_CHECK(tags.select(0, rank).equal(tags.select(0, mesh_.shard.local_rank())),
                  "all_gather for ", label_, ": rank ",
                  mesh_.shard.ranks()[static_cast<std::size_t>(rank)],
                  " gathers another unit meanwhile; a unit that only some ranks run needs "
                  "Options::may_be_unused");
  }
}

void ParameterGroup::fill_whole_tensors(Communication& communication) {
  if (shares_memory()) {
    return;
  }
  wait_for_gather(communication);
  if (whole_.allocated()) {  // gathered in place
    return;
  }
  whole_.allocate();
  // The same values under new memory: autograd must not take this for a change.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (gathered_) {
    const std::int64_t ranks = mesh_.shard.size();
    const at::Tensor rows = gathered_->tensor.view({ranks, gathered_->tensor.numel() / ranks});
    check_tags(rows);
    encoded_ ? encoded_->decode(rows, whole_.tensors()) : unpack(rows, segments_, whole_.tensors());
    communication.pool().release(*std::exchange(gathered_, std::nullopt),
                                 communication.streams().record(Lane::kCompute));
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    whole_.tensors()[i].copy_(parameters_[i].shard(), /*non_blocking=*/true);
  }
}

void ParameterGroup::show_sharded(Communication& communication) {
  if (unsharded_) {
    communication.streams().note("reshard " + label_);
    for (ShardedParameter& parameter : parameters_) {
      parameter.show_sharded();
    }
    unsharded_ = false;
  }
}

/// Memory that a collective may have written belongs to the all-gather lane.
void ParameterGroup::free_whole_tensors(Communication& communication) {
  if (whole_.allocated()) {
    communication.streams().order(Lane::kCompute, Lane::kAllGather);
    whole_.free();
    if (encoded_) {
      encoded_->drop_metadata();
    }
  }
}

void ParameterGroup::reshard(Communication& communication) {
  show_sharded(communication);
  if (gather_ != nullptr) {  // prefetched, but not used
    wait_for_gather(communication);
  }
  neighbours_.drop();
  if (gathered_) {
    communication.pool().release(*std::exchange(gathered_, std::nullopt), nullptr);
  }
  free_whole_tensors(communication);
}

void ParameterGroup::reshard_after_forward(Communication& communication) {
  if (unsharded_ && neighbours_.count() > 1 && !shares_memory()) {
    const c10::AutoGradMode no_grad(false);
    neighbours_.keep(whole_.flat());
    show_sharded(communication);
    free_whole_tensors(communication);
  } else {
    reshard(communication);
  }
}

}  // namespace tessera::fsdp

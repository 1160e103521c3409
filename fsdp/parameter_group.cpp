#include "parameter_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "call_agreement.h"
#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;
using comm::LaneScope;

/// The ranks that keep pieces of what they have gathered; no mesh where nobody does, or all ranks
/// would, of what the shards are already.
DeviceMesh neighbours_of(const DataMesh& mesh, std::int64_t count) {
  const std::int64_t ranks = mesh.shard.size();
  if (mesh.replica) {
    return mesh.replica.size() < ranks ? mesh.replica : DeviceMesh();
  }
  if (count == 1 || count == ranks) {
    return {};
  }
  const auto first = mesh.shard.ranks().begin() + mesh.shard.local_rank() / count * count;
  const std::vector<std::string>& names = mesh.shard.shape().names();
  const std::string name = detail::concat(names.empty() ? "dp" : names.front(), "/", count);
  return {mesh.shard.world(), std::vector<int>(first, first + count), MeshShape({count}, {name})};
}

/// Calls or waits for a gather; where ranks disagree, says what that means here.
template <class Act>
void gathering(Act&& act) {
  try {
    act();
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail(error.what(), kHintOfUnusedUnits);
  }
}

}  // namespace

ParameterGroup::ParameterGroup(std::vector<ShardedParameter> parameters, DataMesh mesh,
                               const Options& options, std::shared_ptr<const CollectiveHooks> hooks)
    : parameters_(std::move(parameters)),
      mesh_(std::move(mesh)),
      device_(mesh_.device()),
      mp_policy_(options.mp_policy),
      extension_(options.all_gather_extension),
      hooks_(std::move(hooks)),
      neighbours_(neighbours_of(mesh_, options.neighbours)),
      gradient_divisor_(static_cast<double>(mesh_.ranks())) {
  segments_ = segments_of(all_parameters());
  take_types();
}

std::vector<ShardedParameter*> ParameterGroup::all_parameters() {
  std::vector<ShardedParameter*> all;
  for (ShardedParameter& parameter : parameters_) {
    all.push_back(&parameter);
  }
  return all;
}

bool ParameterGroup::gathers_in_place() const {
  const bool rows = std::ranges::all_of(
      segments_, [](const Segment& segment) { return segment.shape.dim == std::int64_t{0}; });
  return rows && mesh_.shard.size() > 1 && !hooks_->packs_gathers() && !encoded_ &&
         mesh_.shard.group().moves_groups_in_place();
}

void ParameterGroup::start_unshard(Communication& communication) {
  const bool started = gather_ != nullptr || gathered_ || whole_.allocated();
  if (unsharded_ || started || mesh_.shard.size() == 1) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  communication.streams().note("all_gather " + label_);
  choose_lane(communication);
  const LaneScope lane(communication.streams(), gather_lane_);
  if (neighbours_.kept()) {
    whole_.allocate();
    gather_ = neighbours_.start_gather(whole_.flat(), label_);
    return;
  }
  gathered_versions_ = shard_versions();
  const comm::PurposeScope purpose(mesh_.shard.group(), label_);
  send_ = encoded_ ? encode_shards() : flat_.to(device_, compute_dtype_, /*non_blocking=*/true);
  const bool in_place = !whole_.padded().empty() && !hooks_->packs_gathers();
  try {
    gathering([&] { in_place ? start_gather_in_place() : start_gather_packed(communication); });
  } catch (...) {
    discard_gather();
    throw;
  }
}

/// Between gathers: what the compute lane did comes before what another lane will.
void ParameterGroup::choose_lane(Communication& communication) {
  if (std::exchange(gather_lane_, async_op_ ? Lane::kCompute : Lane::kAllGather) ==
      Lane::kCompute) {
    follow_compute(communication);
  }
}

void ParameterGroup::follow_compute(Communication& communication) const {
  if (gather_lane_ != Lane::kCompute) {
    communication.streams().order(Lane::kCompute, gather_lane_);
  }
}

at::Tensor ParameterGroup::encode_shards() {
  std::vector<at::Tensor> shards;
  for (const ShardedParameter& parameter : parameters_) {
    shards.push_back(parameter.shard().to(device_, /*non_blocking=*/true));
  }
  return encoded_->encode(shards);
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
  const MemorySource memory = hooks_->gather_memory(group);
  if (memory.group != nullptr) {
    sent_ = communication.pool().acquire(send_.numel(), send_.scalar_type(), gather_lane_, memory);
    sent_->tensor.copy_(send_, /*non_blocking=*/true);
    send_ = sent_->tensor;
  }
  gathered_ = communication.pool().acquire(group.size() * send_.numel(), send_.scalar_type(),
                                           gather_lane_, memory);
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
    const LaneScope lane(communication.streams(), gather_lane_);
    if (gather_ != nullptr) {
      try {
        gathering([work = std::exchange(gather_, nullptr)] { work->wait(); });
      } catch (...) {
        discard_gather();
        throw;
      }
    }
    send_.reset();
    if (sent_) {
      communication.pool().release(*std::exchange(sent_, std::nullopt), nullptr);
    }
  }
  if (gather_lane_ != Lane::kCompute) {
    communication.streams().order(gather_lane_, Lane::kCompute);
  }
  neighbours_.end_gather();
  if (!keeps_pieces()) {
    neighbours_.drop();
  }
}

/// One that failed: nobody may take its buffers for values.
void ParameterGroup::discard_gather() {
  gather_ = nullptr;
  send_.reset();
  sent_.reset();
  neighbours_.end_gather();
  neighbours_.drop();
  gathered_.reset();
  whole_.free();
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

/// Memory that a collective may have written belongs to the lane of the gather.
void ParameterGroup::free_whole_tensors(Communication& communication) {
  if (whole_.allocated()) {
    follow_compute(communication);
    whole_.free();
    if (encoded_) {
      encoded_->drop_metadata();
    }
  }
}

void ParameterGroup::free_gathered(Communication& communication) {
  show_sharded(communication);
  if (gather_ != nullptr) {  // prefetched, but not used
    wait_for_gather(communication);
  }
  if (gathered_) {
    communication.pool().release(*std::exchange(gathered_, std::nullopt), nullptr);
  }
  free_whole_tensors(communication);
}

void ParameterGroup::reshard(Communication& communication) {
  free_gathered(communication);
  neighbours_.drop();
}

void ParameterGroup::reshard_for_now(Communication& communication) {
  if (unsharded_ && neighbours_.enabled() && !neighbours_.kept()) {
    const c10::AutoGradMode no_grad(false);
    neighbours_.keep(whole_.flat());
  }
  free_gathered(communication);
}

/// Grows with each write to a shard that autograd sees.
std::uint64_t ParameterGroup::shard_versions() const {
  std::uint64_t sum = 0;
  for (const ShardedParameter& parameter : parameters_) {
    sum += parameter.version();
  }
  return sum;
}

bool ParameterGroup::has_valid_piece() const {
  return neighbours_.kept() && gathered_versions_ == shard_versions() &&
         std::ranges::none_of(parameters_, &ShardedParameter::is_replaced) && laid_out();
}

void ParameterGroup::discard(Communication& communication) {
  try {
    reshard(communication);
  } catch (const Error&) {
    // A gather under way has failed, and has been discarded.
  }
}

void ParameterGroup::add_sharding_groups(std::vector<comm::Communicator*>& groups) {
  if (mesh_.shard.size() > 1) {
    groups.push_back(&mesh_.shard.group());
  }
  if (neighbours_.enabled()) {
    groups.push_back(&neighbours_.group());
  }
}

void ParameterGroup::add_replica_groups(std::vector<comm::Communicator*>& groups) {
  if (mesh_.replicas() > 1) {
    groups.push_back(&mesh_.replicate.group());
  }
}

}  // namespace tessera::fsdp

// The all-gather of a group, from the first request to the unsharded parameters in the slots and
// back. start_unshard() and unshard() are separate, so that a gather runs beside another unit's
// computation. Memory rule: memory that a lane has allocated is reused once that lane has waited
// for its last user, and for nothing else; every wait() and record() below serves this rule.

#include "parameter_group/gathered_state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "tessera/core/error.h"
#include "tessera/kernels/detail/pack.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;
using comm::LaneScope;

/// Calls or waits for a gather; where ranks disagree, says what that means here.
template <class Act>
void gathering(const Settings& settings, Act&& act) {
  try {
    act();
    // A peer's failure has its own message; the hint would mislead.
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail(error.what(), settings.hint_of_unused_units(error.what()));
  }
}

}  // namespace

// The phases: kGathering, an all-gather is under way or its results are not unpacked; kUnsharded,
// the filled tensors are in the slots. What else is stored follows from how it was gathered.
GatheredState::GatheredState(ParameterGroupShards& shards, std::int64_t post_forward_mesh_size,
                             std::shared_ptr<const Settings> settings)
    : shards_(&shards),
      settings_(std::move(settings)),
      post_forward_(shards.mesh(), post_forward_mesh_size) {}

void GatheredState::lay_out(CommContext& context) {
  const c10::AutoGradMode no_grad(false);
  // The layout is new: types or devices may have changed with a conversion.
  const FlatBufferLayout& lay = layout();
  // One rank sends nothing, so that extensions have nothing to do.
  encoded_ = lay.ranks() > 1 ? EncodedGather::of(shards_->parameters(), lay.compute_dtype())
                             : std::nullopt;
  if (!lay.shares_memory()) {
    unsharded_ = UnshardedTensors(lay.segments(), lay.compute_dtype(), lay.device(),
                                  gathers_in_place(), post_forward_.count());
  }
  std::vector<ShardedParameter>& parameters = shards_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    // Detached, so that the leaf that forward sees has a separate gradient.
    parameters[i].set_unsharded(lay.shares_memory() ? parameters[i].shard().detach()
                                                    : unsharded_.tensors()[i]);
  }
  // The copies above come before the gather that sends them.
  choose_lane(context);
  follow_compute(context);
}

/// An all-gather of rows writes them to their final places: no buffer, and no copy out of it.
bool GatheredState::gathers_in_place() const {
  return layout().splits_rows() && layout().ranks() > 1 && !settings_->hooks.packs_gathers() &&
         !encoded_ && group().moves_groups_in_place();
}

bool GatheredState::start_unshard(CommContext& context) {
  // Prefetched, or unsharded still. One rank has nothing to gather.
  if (phase_.now() != GatherPhase::kSharded || layout().ranks() == 1) {
    return false;
  }
  const c10::AutoGradMode no_grad(false);
  context.streams().begin_unit(Lane::kAllGather, settings_->label);
  choose_lane(context);
  const LaneScope lane(context.streams(), lane_);
  // Before the call, so that discard_gather() finds a gather to end if it throws.
  phase_.enter(GatherPhase::kGathering, settings_->label);
  try {
    start_gather(context);
  } catch (...) {
    discard_gather();
    throw;
  }
  return true;
}

void GatheredState::start_gather(CommContext& context) {
  if (post_forward_.kept()) {
    // The pieces were cut from this memory as a whole, so they are gathered into it.
    allocate_in_lane(context);
    gathering(*settings_, [&] {
      gather_ =
          post_forward_.start_gather(unsharded_.flat(), settings_->label, context.streams(), lane_);
    });
    return;
  }
  // What this gather, and pieces cut from it, are compared with (is_current).
  gathered_versions_ = shards_->versions();
  const comm::PurposeScope purpose(group(), settings_->label);
  // With equal types and devices this is the flat buffer itself: no copy.
  send_ = encoded_ ? encode_shards()
                   : shards_->flat().to(layout().device(), layout().compute_dtype(),
                                        /*non_blocking=*/true);
  // A hook that was set after the layout was made needs buffers.
  const bool in_place = !unsharded_.padded().empty() && !settings_->hooks.packs_gathers();
  if (in_place) {
    allocate_in_lane(context);
  }
  gathering(*settings_, [&] { in_place ? start_gather_in_place() : start_gather_packed(context); });
}

/// Between gathers: the next lane waits for what the compute lane has done.
void GatheredState::choose_lane(CommContext& context) {
  const Lane next = settings_->unshard_async_op ? Lane::kCompute : Lane::kAllGather;
  // The lane may change between gathers only: the buffers of one belong to where it began.
  if (std::exchange(lane_, next) == Lane::kCompute) {
    follow_compute(context);
  }
}

void GatheredState::follow_compute(CommContext& context) const {
  if (lane_ != Lane::kCompute) {
    context.streams().order(Lane::kCompute, lane_);
  }
}

at::Tensor GatheredState::encode_shards() {
  // Offloaded shards go to the device first, where extensions compute.
  std::vector<at::Tensor> shards;
  for (const ShardedParameter& parameter : shards_->parameters()) {
    shards.push_back(parameter.shard().to(layout().device(), /*non_blocking=*/true));
  }
  return encoded_->encode(shards);
}

/// The lane waits for the last use of the memory that an earlier unit has released.
void GatheredState::allocate_in_lane(CommContext& context) {
  memory_ = context.pool().acquire(unsharded_.bytes(), at::kByte, lane_);
  unsharded_.lend(memory_->tensor);
}

void GatheredState::start_gather_in_place() {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  const std::vector<Segment>& segments = layout().segments();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::int64_t numel = segments[i].shape.padded_numel();
    // Communicators take no empty tensors.
    if (numel > 0) {
      inputs.push_back(send_.narrow(0, segments[i].offset, numel));
      outputs.push_back(unsharded_.padded()[i]);
    }
  }
  if (!inputs.empty()) {
    gather_ = group().all_gather_group(outputs, inputs);
  }
}

void GatheredState::start_gather_packed(CommContext& context) {
  const CollectiveHooks& hooks = settings_->hooks;
  const MemorySource memory = hooks.gather_memory(group());
  // The group can send from its own memory only: registered, or a custom allocator's.
  if (memory.group != nullptr) {
    sent_ = context.pool().acquire(send_.numel(), send_.scalar_type(), lane_, memory);
    sent_->tensor.copy_(send_, /*non_blocking=*/true);
    send_ = sent_->tensor;
  }
  gathered_ =
      context.pool().acquire(group().size() * send_.numel(), send_.scalar_type(), lane_, memory);
  const at::Tensor output = gathered_->tensor.view({group().size(), send_.numel()});
  gather_ = hooks.all_gather ? hooks.all_gather(group(), output, send_)
                             : group().all_gather(output, send_);
}

void GatheredState::unshard(CommContext& context) {
  // Also if it is still unsharded: the program must not see whether it was gathered again.
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.count_writes();
  }
  if (unsharded()) {
    return;
  }
  // A no-op if the unit or a prefetch has started it.
  start_unshard(context);
  context.streams().note("unshard " + settings_->label);
  try {
    fill(context);
  } catch (...) {
    discard_gather();
    throw;
  }
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.set_gathered(true);
  }
  phase_.enter(GatherPhase::kUnsharded, settings_->label);
}

void GatheredState::show() {
  if (shown_ || !unsharded()) {
    return;
  }
  // Optimizers and checkpoints still see the shards: slots hold a persistent tensor as well.
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.show_unsharded();
  }
  shards_->begin_use();
  shown_ = true;
}

void GatheredState::hide() {
  if (!std::exchange(shown_, false)) {
    return;
  }
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.show_sharded();
  }
}

/// The all-gather lane waits as well as the compute lane: it owns the memory that was read.
void GatheredState::wait_for_gather(CommContext& context) {
  if (layout().ranks() == 1) {
    return;
  }
  {
    const LaneScope lane(context.streams(), lane_);
    if (gather_ != nullptr) {
      try {
        gathering(*settings_, [work = std::exchange(gather_, nullptr)] { work->wait(); });
      } catch (...) {
        discard_gather();
        throw;
      }
    }
    send_.reset();
    if (sent_) {
      // No event: the lane that allocated it has just waited for the collective.
      context.pool().release(*std::exchange(sent_, std::nullopt), nullptr);
    }
  }
  if (lane_ != Lane::kCompute) {
    context.streams().order(lane_, Lane::kCompute);
  }
  post_forward_.end_gather();
  // A piece that serves one backward is used up.
  if (!keeps_pieces()) {
    post_forward_.drop();
  }
}

/// For a gather that failed: its buffers hold no values.
void GatheredState::discard_gather() {
  gather_ = nullptr;
  send_.reset();
  sent_.reset();
  post_forward_.end_gather();
  post_forward_.drop();
  gathered_.reset();
  unsharded_.free();
  memory_.reset();
  if (phase_ == GatherPhase::kGathering) {
    phase_.enter(GatherPhase::kSharded, settings_->label);
  }
}

void GatheredState::fill(CommContext& context) {
  if (layout().shares_memory()) {
    return;
  }
  wait_for_gather(context);
  // The lane's own memory: a gather wrote into it. Empty shards have it, too.
  if (memory_) {
    return;
  }
  unsharded_.allocate();
  // The same values in new memory: autograd must not count this as a write.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<at::Tensor>& tensors = unsharded_.tensors();
  if (gathered_) {
    const std::int64_t ranks = layout().ranks();
    // The width is in numbers of 8 bytes under an extension, in elements otherwise.
    const at::Tensor rows = gathered_->tensor.view({ranks, gathered_->tensor.numel() / ranks});
    encoded_ ? encoded_->decode(rows, tensors) : unpack(rows, layout().segments(), tensors);
    decoded_ = context.streams().record(Lane::kCompute);
    context.pool().release(*std::exchange(gathered_, std::nullopt), decoded_);
    return;
  }
  // One rank, whose shards differ from the unsharded tensors in type or device.
  gathered_versions_ = shards_->versions();
  std::vector<at::Tensor> shards;
  for (const ShardedParameter& parameter : shards_->parameters()) {
    shards.push_back(parameter.shard());
  }
  kernels::copy_all(tensors, shards, /*non_blocking=*/true);
}

/// Unpacked tensors are in compute's memory. Memory that a gather wrote to is reused by its lane,
/// after compute; on a CPU, or in one lane, it is free at once.
void GatheredState::free_unsharded(CommContext& context) {
  if (!unsharded_.allocated() && !memory_) {
    return;
  }
  unsharded_.free();
  if (encoded_) {
    // Made in the gather's lane, as the encoded shards were.
    context.streams().wait(lane_, std::exchange(decoded_, nullptr));
    encoded_->drop_metadata();
  }
  if (!memory_) {
    return;
  }
  const bool used = unsharded() && lane_ != Lane::kCompute;
  if (auto event = used ? context.streams().record(Lane::kCompute) : nullptr) {
    // One unit's memory is idle at a time: the next gather takes it.
    context.pool().drop(lane_);
    context.pool().release(*std::move(memory_), std::move(event));
  }
  memory_.reset();
}

void GatheredState::free_gathered(CommContext& context) {
  if (phase_ == GatherPhase::kSharded) {
    return;
  }
  if (unsharded()) {
    context.streams().note("reshard " + settings_->label);
    hide();
    for (ShardedParameter& parameter : shards_->parameters()) {
      parameter.set_gathered(false);
    }
  }
  if (gather_ != nullptr) {  // prefetched, but not used
    wait_for_gather(context);
  }
  if (gathered_) {
    context.pool().release(*std::exchange(gathered_, std::nullopt), nullptr);
  }
  free_unsharded(context);
  phase_.enter(GatherPhase::kSharded, settings_->label);
}

void GatheredState::reshard(CommContext& context) {
  free_gathered(context);
  post_forward_.drop();
}

void GatheredState::reshard_for_now(CommContext& context) {
  // A second forward before backward finds the piece of the first.
  if (unsharded() && post_forward_.enabled() && !post_forward_.kept()) {
    const c10::AutoGradMode no_grad(false);
    post_forward_.keep(unsharded_.flat(), context.streams());
  }
  free_gathered(context);
}

void GatheredState::reshard_unused(CommContext& context) {
  if (is_gathering()) {
    free_gathered(context);
  }
}

void GatheredState::discard(CommContext& context) {
  try {
    // The slots get their shards back before the wait that may throw.
    reshard(context);
  } catch (const Error&) {
    // A gather under way has failed, and has been discarded.
  }
}

bool GatheredState::is_current() const {
  // Written, replaced or moved shards all mean that the copies have old values.
  return holds_copies() && gathered_versions_ == shards_->versions() && !shards_->any_replaced() &&
         shards_->laid_out();
}

void GatheredState::add_groups(std::vector<comm::Communicator*>& groups) {
  if (layout().ranks() > 1) {
    groups.push_back(&group());
  }
  // The first call of group() makes the communicator, which is collective: so this depends only on
  // the options, never on what was gathered.
  if (post_forward_.enabled()) {
    groups.push_back(&post_forward_.group());
  }
}

}  // namespace tessera::fsdp

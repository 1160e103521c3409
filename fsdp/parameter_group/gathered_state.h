#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parameter_group/comm_context.h"
#include "parameter_group/encoded_gather.h"
#include "parameter_group/parameter_group_shards.h"
#include "parameter_group/unsharded_tensors.h"
#include "state/phases.h"
#include "state/settings.h"
#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

/// The state of a gathered group: the all-gather under way, and the unsharded tensors.
///
/// The unsharded tensors share one storage, which is freed when the group is resharded. Where the
/// communicator moves groups in place and all shards are rows, it gathers straight into them. On a
/// mesh of one rank nothing is communicated, and without a change of type or device nothing copied:
/// the unsharded tensor is the shard.
class GatheredState {
 public:
  /// `shards` must outlive this. `post_forward_mesh_size`: as the option.
  GatheredState(ParameterGroupShards& shards, std::int64_t post_forward_mesh_size,
                std::shared_ptr<const Settings> settings);

  /// Makes the unsharded tensors, for shards that were laid out.
  void lay_out(CommContext& context);

  bool unsharded() const { return phase_ == GatherPhase::kUnsharded; }
  bool is_gathering() const { return phase_ == GatherPhase::kGathering; }
  /// Whether copies of the shards' values are gathered, under way, or kept as a piece.
  bool holds_copies() const {
    return !layout().shares_memory() && (phase_ != GatherPhase::kSharded || post_forward_.kept());
  }
  /// Whether these are the shards' current values.
  bool is_current() const;
  /// Starts the all-gather; false if there is nothing to gather. Collective.
  bool start_unshard(CommContext& context);
  /// Fills the unsharded tensors. Collective unless started before.
  void unshard(CommContext& context);
  /// Puts the unsharded tensors into the slots, for as long as the unit computes.
  void show();
  /// Puts the shards into the slots; the group stays gathered. A forward that runs without the
  /// hooks would otherwise find unsharded tensors, whose gradients are never reduced.
  void hide();
  bool shown() const { return shown_; }
  /// hide(), and frees what is gathered.
  void reshard(CommContext& context);
  /// As reshard(), where the same shards will be gathered again: keeps this rank's piece of the
  /// memory for the ranks of the post-forward mesh, if there is one.
  void reshard_for_now(CommContext& context);
  /// Frees what was gathered ahead, if nothing has used it.
  void reshard_unused(CommContext& context);
  /// Frees what is gathered, whether that has succeeded or not.
  void discard(CommContext& context);

  /// Whether pieces are kept for all micro-batches of a step, not for one backward.
  bool keeps_pieces() const { return shards_->mesh().replica && post_forward_.enabled(); }
  void drop_piece() { post_forward_.drop(); }

  /// Adds the groups over which it gathers.
  void add_groups(std::vector<comm::Communicator*>& groups);

 private:
  const FlatBufferLayout& layout() const { return shards_->layout(); }
  comm::Communicator& group() const { return shards_->mesh().shard.group(); }
  bool gathers_in_place() const;
  void allocate_in_lane(CommContext& context);

  void choose_lane(CommContext& context);
  void follow_compute(CommContext& context) const;
  void start_gather(CommContext& context);
  at::Tensor encode_shards();
  void start_gather_in_place();
  void start_gather_packed(CommContext& context);
  void wait_for_gather(CommContext& context);
  void discard_gather();
  void fill(CommContext& context);
  void free_unsharded(CommContext& context);
  void free_gathered(CommContext& context);

  ParameterGroupShards* shards_;
  std::shared_ptr<const Settings> settings_;
  Phase<GatherPhase> phase_{GatherPhase::kSharded};
  bool shown_ = false;  ///< only while unsharded

  UnshardedTensors unsharded_;
  /// The unsharded tensors' memory, where a gather wrote into it: it belongs to the gather's lane.
  std::optional<BufferPool::Buffer> memory_;
  std::optional<EncodedGather> encoded_;  ///< empty: values are gathered
  PostForwardShard post_forward_;
  std::uint64_t gathered_versions_ = 0;  ///< versions of the shards at the last gather

  comm::Lane lane_ = comm::Lane::kAllGather;    ///< the lane of the last gather
  at::Tensor send_;                             ///< the input of the all-gather under way
  std::optional<BufferPool::Buffer> sent_;      ///< its memory, if the group's
  std::optional<BufferPool::Buffer> gathered_;  ///< (ranks, flat numel), unless in place
  comm::StreamEventPtr decoded_;                ///< what extensions were given has been read
  comm::WorkPtr gather_;
};

}  // namespace tessera::fsdp

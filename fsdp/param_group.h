#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffers.h"
#include "param.h"
#include "state.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

class GradientState;
class ParameterGroup;
class ShardedParameter;

/// What units use to communicate: the streams, the buffers, and the reductions under way. All units
/// of a model share one.
class CommContext {
 public:
  CommContext(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), pool_(streams_, device) {}

  comm::Streams& streams() { return *streams_; }
  BufferPool& pool() { return pool_; }
  tessera::detail::DeferredSums& sums() { return sums_; }

  /// Starts the reduction of these groups. Finishes those started before first, so that at most one
  /// unit's gradients are being reduced.
  void reduce(std::vector<ParameterGroup>& groups);
  /// Hands out the gradients whose reduction is under way.
  void finish_reductions();
  /// Finishes everything: gradients may be used on the compute lane and, if they are copied to the
  /// host, by the host. Keeps no buffer.
  void settle();
  /// Forgets what these groups have under way: their backward failed, or they are about to go.
  void forget(std::vector<ParameterGroup>& groups);

  /// The reduced gradient of this parameter is copied to the host: settle() waits for the copy, and
  /// notifies the parameter.
  void expect_on_host(ShardedParameter& parameter) { on_host_.push_back(&parameter); }
  /// Keeps tensors of the compute lane, which another lane uses until `event`, for as long.
  void retire(std::vector<at::Tensor> tensors, comm::StreamEventPtr event);

 private:
  struct Retired {
    std::vector<at::Tensor> tensors;
    comm::StreamEventPtr event;
  };
  void free_retired();

  comm::StreamsPtr streams_;
  BufferPool pool_;
  std::vector<GradientState*> reducing_;
  std::vector<Retired> retired_;
  tessera::detail::DeferredSums sums_;
  std::vector<ShardedParameter*> on_host_;
};
using CommContextPtr = std::shared_ptr<CommContext>;

/// How a group's gradients are reduced, by the settings when the reduction started.
struct ReductionOptions {
  c10::ScalarType dtype;
  double divisor = 1;  ///< the sum over all ranks is divided by it
  bool all_reduce =
      true;  ///< false: over replicas in a later reduction, with what comes until then
  bool force_sum = false;                    ///< no part of the division comes before the sum
  std::shared_ptr<const Settings> settings;  ///< for the label and the hook
};

/// The reduction of a group's gradients under way: one reduce-scatter over the dimension that
/// shards, one all-reduce of the shards over the one that replicates, divided. Gradients are sent
/// from autograd's memory if the communicator can and the rows divide evenly, else packed. On a
/// mesh of one rank nothing is packed or sent.
class GradientReduction {
 public:
  /// Starts. `gradients`: of the unsharded `parameters`, zeros for one that has none, so that what
  /// is sent never depends on the rank. Collective over `mesh`. The parameters must outlive this.
  GradientReduction(std::vector<ShardedParameter*> parameters,
                    std::vector<UnshardedGradient> gradients, const DataMesh& mesh,
                    ReductionOptions options, CommContext& context);

  /// Waits, and adds the result to the sharded parameters' gradients in their type; what another
  /// group still has to sum goes through context.sums() first. Works in the reduce-scatter lane; on
  /// one rank, whose gradients are still compute's, in the compute lane.
  void finish(CommContext& context);

 private:
  const AllReduceHook& hook() const { return options_.settings->all_reduce_hook; }
  const std::string& label() const { return options_.settings->label; }
  bool in_place() const;
  void start(CommContext& context);
  void reduce_in_place(CommContext& context);
  void reduce_packed(CommContext& context);
  c10::TensorOptions tensor_options() const;
  at::Tensor shard(std::size_t index) const;
  void wait(CommContext& context);
  void join_earlier();
  /// nullptr if that is left to a later reduction.
  comm::WorkPtr start_all_reduce();
  /// False if that is left to a later reduction.
  bool reduce_over_replicas();
  void hand_out_reduced(CommContext& context);
  void cast_alone(std::vector<at::Tensor*> gradients, c10::ScalarType dtype);
  void convert_alone();
  void hand_out_alone(CommContext& context);
  void hand_out(std::size_t index, const at::Tensor& gradient, CommContext& context);

  std::vector<ShardedParameter*> parameters_;
  std::vector<UnshardedGradient> gradients_;
  DataMesh mesh_;
  ReductionOptions options_;
  std::vector<Segment> segments_;
  double pre_divisor_ = 1;                    ///< divided by before the sum
  std::vector<at::Tensor> held_;              ///< gradients that the collective reads
  std::optional<BufferPool::Buffer> buffer_;  ///< or their packed copy, (ranks, flat numel)
  at::Tensor output_;                         ///< (flat numel)
  comm::WorkPtr work_;
};

/// The permanent state of a group: its parameters' shards, laid out in memory.
class ParameterGroupShards {
 public:
  /// Parameters of one type on one mesh, at least one.
  ParameterGroupShards(std::vector<ShardedParameter> parameters, const DataMesh& mesh,
                       const MixedPrecisionPolicy& policy);

  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const DataMesh& mesh() const { return mesh_; }
  const FlatBufferLayout& layout() const { return layout_; }
  /// This rank's shards, one after another; undefined unless layout().has_flat() and laid out.
  const at::Tensor& flat() const { return flat_; }

  /// Takes over tensors that were put into the slots since; true if there were any. Throws Error
  /// for one whose layout differs from its shard's.
  bool adopt();
  /// Whether the shards are still where lay_out() put them: one that was converted or replaced does
  /// not.
  bool laid_out() const;
  /// Takes the types anew, since a model may be converted after it was sharded, and puts the shards
  /// into a flat buffer. Throws Error, naming them, for parameters that are still on the meta
  /// device or on another one than they should be, and if only a part of the group was converted.
  void lay_out();
  /// Grows with each write to a shard that autograd sees.
  std::uint64_t versions() const;
  /// See ParameterGroup.
  void begin_use();
  std::string lost_write() const;
  /// Whether a slot holds neither its shard nor the unsharded tensor.
  bool any_replaced() const;

 private:
  void check_devices() const;
  void check_types() const;

  std::vector<ShardedParameter> parameters_;
  DataMesh mesh_;
  MixedPrecisionPolicy policy_;
  FlatBufferLayout layout_;
  at::Tensor flat_;
};

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
  void install_unsharded();
  /// Puts the shards into the slots; the group stays gathered. A forward that runs without the
  /// hooks would otherwise find unsharded tensors, whose gradients are never reduced.
  void install_sharded();
  bool installed() const { return installed_; }
  /// install_sharded(), and frees what is gathered.
  void reshard(CommContext& context);
  /// As reshard(), where the same shards will be gathered again: keeps this rank's piece of the
  /// memory for the ranks of the post-forward mesh, if there is one.
  void reshard_for_now(CommContext& context);
  /// Frees what was gathered ahead, if nothing has used it.
  void reshard_unused(CommContext& context);
  /// Frees what is gathered, whether that has succeeded or not.
  void discard(CommContext& context);

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
  bool installed_ = false;  ///< only while unsharded

  UnshardedTensors unsharded_;
  /// The unsharded tensors' memory, where a gather wrote into it: it belongs to the gather's lane.
  std::optional<BufferPool::Buffer> memory_;
  PostForwardShard post_forward_;
  std::uint64_t gathered_versions_ = 0;  ///< versions of the shards at the last gather

  comm::Lane lane_ = comm::Lane::kAllGather;    ///< the lane of the last gather
  at::Tensor send_;                             ///< the input of the all-gather under way
  std::optional<BufferPool::Buffer> gathered_;  ///< (ranks, flat numel), unless in place
  comm::WorkPtr gather_;
};

/// A group's gradients between backward and the optimizer: those set aside, and the reduction under
/// way. Reduced gradients belong to the sharded parameters.
class GradientState {
 public:
  /// `shards` must outlive this.
  GradientState(ParameterGroupShards& shards, std::shared_ptr<const Settings> settings)
      : shards_(&shards), settings_(std::move(settings)) {}

  /// Whether an unsharded parameter has a gradient.
  bool any_unsharded() const;
  /// Forgets what a failed backward left in the unsharded parameters.
  void drop_unsharded();
  /// Also forgets the results of earlier backwards, reduced or not.
  void drop_all();
  /// Sets the unsharded gradients aside, to be added to those of later backwards
  /// (UnreducedGradient).
  void set_aside();
  /// Before backward comes to the unsharded parameters: what was set aside is added to by backward
  /// itself where it can be.
  void restore_accumulated_grads();
  /// Whether gradients were set aside, or wait for the replicas, and a reduction now would complete
  /// them. The same on all ranks, whichever parameters they used.
  bool awaits_reduction() const;
  /// A backward has ended and may have left reductions under way (ShardedParameter).
  void mark_expected();

  /// The number of ranks that each compute a loss; the model's loss is their mean. Default: the
  /// ranks of the group's mesh.
  void set_batch_ranks(std::int64_t ranks) { batch_ranks_ = ranks; }

  /// Starts the reduction of the trainable parameters' gradients, and of what was set aside.
  /// Collective.
  void start_reduce(CommContext& context);
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(CommContext& context);
  /// Forgets it.
  void forget_reduction(CommContext& context);
  /// Whether this rank's own gradient of the parameter in `slot` is kept from the last reduction,
  /// as the smallest one of a group is, and is not finite. Waits for the device.
  bool brought_nonfinite(const nn::ParameterSlot& slot) const;

 private:
  void warn_of_nonfinite(const ShardedParameter& parameter, const at::Tensor& gradient) const;
  UnshardedGradient gradient_to_reduce(ShardedParameter& parameter) const;
  ReductionOptions reduction_options() const;
  void keep_sample(const std::vector<ShardedParameter*>& parameters,
                   const std::vector<UnshardedGradient>& gradients);

  ParameterGroupShards* shards_;
  std::shared_ptr<const Settings> settings_;
  std::optional<std::int64_t> batch_ranks_;
  std::optional<GradientReduction> reduction_;
  nn::SlotPtr sampled_;  ///< the parameter of sample_
  at::Tensor sample_;    ///< its unreduced gradient; undefined: none was small enough
};

/// Parameters of one type, on one mesh, that are gathered in one all-gather and reduced in one
/// reduce-scatter: their shards, what is gathered of them, and their gradients.
class ParameterGroup {
 public:
  /// Shards the parameters, at least one. Not collective. `post_forward_mesh_size`: as the option.
  ParameterGroup(const std::vector<ParameterSpec>& specs, const MixedPrecisionPolicy& policy,
                 std::int64_t post_forward_mesh_size,
                 const std::shared_ptr<const Settings>& settings);

  const std::vector<ShardedParameter>& parameters() const { return shards_->parameters(); }
  std::vector<ShardedParameter>& parameters() { return shards_->parameters(); }
  const DataMesh& mesh() const { return shards_->mesh(); }
  GatheredState& gathered() { return gathered_; }
  const GatheredState& gathered() const { return gathered_; }
  GradientState& gradients() { return gradients_; }
  const GradientState& gradients() const { return gradients_; }

  /// Lays the shards out, and the unsharded tensors, where something was put into the slots or
  /// converted since. To be called before the first unshard of an iteration. Throws as
  /// ParameterGroupShards::adopt and lay_out. Otherwise collective.
  void prepare(CommContext& context);

  /// Forward begins to use the unsharded parameters.
  void begin_use() { shards_->begin_use(); }
  /// The name of an unsharded parameter that was written since, where the write would be lost; "":
  /// none.
  std::string lost_write() const { return shards_->lost_write(); }

  /// Adds the groups over which it gathers and reduce-scatters.
  void add_sharding_groups(std::vector<comm::Communicator*>& groups) {
    gathered_.add_groups(groups);
  }
  /// Adds the one, if any, over which it all-reduces.
  void add_replica_groups(std::vector<comm::Communicator*>& groups);

 private:
  std::unique_ptr<ParameterGroupShards> shards_;  ///< which stays where it is when this is moved
  GatheredState gathered_;
  GradientState gradients_;
};

// What ranks exchange in a step: which collectives they called, whose gathered values are current,
// and which parameters they used. All between the hosts: no tensor is sent and no GPU waited for.

/// Lets the ranks of each group agree on their calls: each group once, those that shard before
/// those that replicate, small before large, so that later groups learn what earlier ones found.
/// Then throws the first Error; PeerError at once. Collective over all of the groups, which must be
/// listed in the same order on all ranks. `settings`: of the root, for its hint.
void agree_on_calls(const std::vector<comm::Communicator*>& sharding,
                    const std::vector<comm::Communicator*>& replicating, const Settings& settings);

/// Frees what a group has gathered on all ranks where one of them has written to its shards since:
/// all gather from the same ranks.
/// `groups` are the same on all ranks. Collective over their meshes. Throws PeerError.
void free_outdated(std::vector<ParameterGroup*> groups, CommContext& context);

/// The ranks that hold a part of a parameter, tensor parallelism's too, agree on whether it was
/// used: one that no rank used gets no gradient, although zeros were reduced for it; one that any
/// rank used gets a gradient on all of them. Also, once a parameter, on how gradients came under
/// tensor parallelism (PartialGradGroup). One exchange a group, whatever the number of parameters.
class UseAgreement {
 public:
  /// The parameters of `group`, which must outlive this.
  void add(ParameterGroup& group);
  /// Collective over the meshes. Throws PeerError.
  void settle();

 private:
  /// Parameters whose parts are on the same ranks.
  struct Peers {
    DeviceMesh mesh;
    std::vector<ShardedParameter*> parameters;
  };

  std::vector<Peers> peers_;  ///< in the order in which they came, which is that of the modules
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END

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
#include "tessera/comm/detail/streams.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

class GradientState;
class ParameterGroup;
class ShardedParameter;

/// The communication state of a model's units: streams, buffers, and the reductions in progress.
class CommContext {
 public:
  CommContext(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), pool_(streams_, device) {}

  comm::Streams& streams() { return *streams_; }
  BufferPool& pool() { return pool_; }
  tessera::detail::DeferredSums& sums() { return sums_; }

  /// Finishes all earlier reductions, then starts the gradient reductions of `groups`. So only one
  /// unit's (or bucket's) gradients are reduced at a time.
  void reduce(const std::vector<ParameterGroup*>& groups);
  void finish_reductions();
  /// Finishes all communication and frees all buffers. Afterwards the compute stream can use the
  /// gradients, and the CPU can use offloaded gradients.
  void settle();
  /// Drops the reductions of `groups`. Called when backward has failed or the groups will be
  /// destroyed.
  void forget(std::vector<ParameterGroup>& groups);

  /// To be called when the copy of a reduced gradient to CPU memory has started. settle() waits for
  /// the copy and calls the parameter's arrive().
  void expect_on_host(ShardedParameter& parameter) { on_host_.push_back(&parameter); }
  /// Keeps `tensors` of the compute stream alive until another stream has passed `event`.
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

/// A running reduction of a parameter group's gradients: reduce-scatter over shards, all-reduce
/// over replicas (HSDP), division. Gradients are packed unless the communicator can send them
/// directly and dimension 0 divides evenly.
class GradientReduction {
 public:
  /// Starts the reduction. An undefined element of `gradients` is sent as zeros. `divisor`: the
  /// divisor of the sum over all ranks. `parameters` must outlive this object. Collective over
  /// `mesh`.
  GradientReduction(std::vector<ShardedParameter*> parameters,
                    std::vector<UnshardedGradient> gradients, const DataMesh& mesh,
                    c10::ScalarType dtype, double divisor, std::shared_ptr<const Settings> settings,
                    CommContext& context);

  /// Waits for the reduction and adds the result to the gradients of the sharded parameters.
  /// context.sums() first computes any remaining sum over another process group.
  void finish(CommContext& context);

 private:
  const std::string& label() const { return settings_->label; }
  bool in_place() const;
  bool averages() const;
  std::string purpose() const;
  void reduce_in_place(CommContext& context);
  void reduce_packed(CommContext& context);
  void pack_divided(const std::vector<at::Tensor>& gradients, const at::Tensor& packed) const;
  c10::TensorOptions tensor_options() const;
  at::Tensor shard(std::size_t index) const;
  void wait(CommContext& context);
  void join_earlier();
  /// Starts the all-reduce over replicas (HSDP). Returns nullptr if a later reduction will
  /// all-reduce this sum.
  comm::WorkPtr start_all_reduce();
  bool reduce_over_replicas();
  void hand_out_reduced(CommContext& context);
  void cast_alone(std::vector<at::Tensor*> gradients, c10::ScalarType dtype);
  void convert_alone();
  void hand_out_alone(CommContext& context);
  void hand_out(std::size_t index, const at::Tensor& gradient, CommContext& context);

  std::vector<ShardedParameter*> parameters_;
  std::vector<UnshardedGradient> gradients_;
  DataMesh mesh_;
  c10::ScalarType dtype_;
  double divisor_;
  std::shared_ptr<const Settings> settings_;
  // Copies of fields of Settings, so that later changes of the settings have no effect.
  bool all_reduce_;
  bool force_sum_;
  AllReduceHook hook_;
  std::vector<Segment> segments_;
  double pre_divisor_ = 1;                    ///< divides gradients before the sum
  ReduceOp op_ = ReduceOp::kSum;              ///< kAvg: the reduce-scatter also divides
  std::vector<at::Tensor> held_;              ///< gradients that the collective reads
  std::optional<BufferPool::Buffer> buffer_;  ///< packed gradients, (ranks, flat numel)
  at::Tensor output_;                         ///< this rank's shards of the reduced gradients, 1-D
  comm::WorkPtr work_;
};

/// The shards of a parameter group, and their layout in memory.
class ParameterGroupShards {
 public:
  ParameterGroupShards(std::vector<ShardedParameter> parameters, const DataMesh& mesh,
                       const MixedPrecisionPolicy& policy);

  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const DataMesh& mesh() const { return mesh_; }
  const FlatBufferLayout& layout() const { return layout_; }
  /// This rank's shards in one flat buffer. Undefined before lay_out(), or if layout().has_flat()
  /// is false.
  const at::Tensor& flat() const { return flat_; }

  /// Makes tensors that replaced parameters since the last call the new shards. Returns whether
  /// there are any. Throws Error if a new tensor has another layout than its shard.
  bool adopt();
  /// Whether no conversion or load has moved a shard since lay_out().
  bool laid_out() const;
  /// Puts the shards into one flat buffer. Throws Error for parameters on a wrong device (also
  /// meta), and if only some of the parameters were converted to another dtype.
  void lay_out();
  /// A number that grows with each write to a shard, as autograd's version counters do.
  std::uint64_t versions() const;
  void begin_use();
  std::string lost_write() const;
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

/// The gathered state of a parameter group: the all-gather in progress, and the unsharded tensors
/// in one storage. Resharding frees the storage. On a mesh of one rank, the unsharded tensors are
/// copies of the shards or the shards.
class GatheredState {
 public:
  /// `shards` must outlive this object. `post_forward_mesh_size`: the value of
  /// Options::post_forward_mesh_size.
  GatheredState(ParameterGroupShards& shards, std::int64_t post_forward_mesh_size,
                std::shared_ptr<const Settings> settings);

  void lay_out(CommContext& context);

  bool unsharded() const { return phase_ == GatherPhase::kUnsharded; }
  bool is_gathering() const { return phase_ == GatherPhase::kGathering; }
  /// Whether there are copies of the shards' values: gathered, being gathered, or cached
  /// (Options::post_forward_mesh_size).
  bool holds_copies() const {
    return !layout().shares_memory() && (phase_ != GatherPhase::kSharded || post_forward_.kept());
  }
  /// Whether the gathered copies equal the shards' current values.
  bool is_current() const;
  /// Starts the all-gather. Returns false if there is nothing to gather. Collective.
  bool start_unshard(CommContext& context);
  /// Fills the unsharded tensors by an all-gather. Collective unless start_unshard() was called.
  void unshard(CommContext& context);
  /// Puts the unsharded tensors into the nn::ParameterSlots, so that the unit's modules use them.
  void install_unsharded();
  /// Puts the shards into the nn::ParameterSlots, but frees no memory. A forward without hooks then
  /// cannot use the unsharded tensors.
  void install_sharded();
  bool installed() const { return installed_; }
  /// Calls install_sharded() and frees the gathered memory.
  void reshard(CommContext& context);
  /// Like reshard(), but caches this rank's part of the gathered memory
  /// (Options::post_forward_mesh_size). The shards must not change before the next gather.
  void reshard_for_now(CommContext& context);
  void reshard_unused(CommContext& context);
  /// Frees the gathered memory, even if the gather has failed.
  void discard(CommContext& context);

  void drop_piece() { post_forward_.drop(); }

  /// Appends the process groups over which this parameter group gathers.
  void add_groups(std::vector<comm::Communicator*>& groups);

 private:
  const FlatBufferLayout& layout() const { return shards_->layout(); }
  comm::Communicator& group() const { return shards_->mesh().shard.group(); }
  bool gathers_in_place() const;
  void allocate_in_lane(CommContext& context);

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
  bool installed_ = false;  ///< whether the unsharded tensors are in the parameter slots

  UnshardedTensors unsharded_;
  /// The memory of the unsharded tensors if an all-gather writes directly into these tensors; owned
  /// by the all-gather stream.
  std::optional<BufferPool::Buffer> memory_;
  PostForwardShard post_forward_;
  std::uint64_t gathered_versions_ = 0;  ///< the shards' versions when the last gather began

  at::Tensor send_;                             ///< the input of the all-gather in progress
  std::optional<BufferPool::Buffer> gathered_;  ///< packed result of the all-gather in progress
  comm::WorkPtr gather_;
};

/// The unreduced gradients of a parameter group: stored gradients of earlier backwards, and the
/// reduction in progress. The class ShardedParameter stores the reduced gradients.
class GradientState {
 public:
  GradientState(ParameterGroupShards& shards, std::shared_ptr<const Settings> settings)
      : shards_(&shards), settings_(std::move(settings)) {}

  bool any_unsharded() const;
  /// Drops the gradients that a failed backward left in the unsharded parameters.
  void drop_unsharded();
  /// Drops the gradients of the unsharded parameters and the gradients of all earlier backwards,
  /// reduced or unreduced.
  void drop_all();
  /// Stores the gradients of the unsharded parameters unreduced (UnreducedGradient), for addition
  /// in later backwards.
  void set_aside();
  /// To be called before backward reaches the unsharded parameters, so that backward can add
  /// directly to stored gradients.
  void restore_accumulated_grads();
  /// Whether a reduction with the current settings must include stored gradients, or sums that wait
  /// for the all-reduce over replicas. Equal on all ranks.
  bool awaits_reduction() const;
  /// To be called when backward has ended, if reductions can still be in progress
  /// (ShardedParameter::mark_expected).
  void mark_expected();

  /// `ranks`: the number of ranks with a loss of their own; the model's loss is the mean of these
  /// losses. Default: all ranks of the group's mesh.
  void set_batch_ranks(std::int64_t ranks) { batch_ranks_ = ranks; }

  /// Starts the reduction of the trainable parameters' gradients, including the stored gradients of
  /// earlier backwards. Collective.
  void start_reduce(CommContext& context);
  /// Waits for the reduction and adds its result to the parameters' gradients (GradientReduction).
  void finish_reduce(CommContext& context);
  void forget_reduction(CommContext& context);
  /// Whether keep_sample() saved a gradient of the parameter in `slot` with a NaN or Inf. Waits for
  /// the device.
  bool brought_nonfinite(const nn::ParameterSlot& slot) const;

 private:
  void warn_of_nonfinite(const ShardedParameter& parameter, const at::Tensor& gradient) const;
  UnshardedGradient gradient_to_reduce(ShardedParameter& parameter) const;
  void keep_sample(const std::vector<ShardedParameter*>& parameters,
                   const std::vector<UnshardedGradient>& gradients);

  ParameterGroupShards* shards_;
  std::shared_ptr<const Settings> settings_;
  std::optional<std::int64_t> batch_ranks_;
  std::optional<GradientReduction> reduction_;
  nn::SlotPtr sampled_;  ///< the parameter whose gradient is sample_
  at::Tensor sample_;    ///< the unreduced gradient with the fewest elements
};

/// Parameters of one dtype and one mesh, with their shards, gathered state and gradients. These
/// parameters share one all-gather and one reduce-scatter.
class ParameterGroup {
 public:
  /// Shards the parameters (at least one). Not collective. `post_forward_mesh_size`: the value of
  /// Options::post_forward_mesh_size.
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

  /// To be called before the first unshard of an iteration. After a change of parameters, makes new
  /// layouts and unsharded tensors. Throws what ParameterGroupShards::adopt and lay_out throw.
  /// Collective unless an error is thrown.
  void prepare(CommContext& context);

  /// Marks the beginning of a forward that uses the unsharded parameters.
  void begin_use() { shards_->begin_use(); }
  /// Returns the name of an unsharded parameter with a write since begin_use() that would be lost,
  /// or "".
  std::string lost_write() const { return shards_->lost_write(); }

  void add_replica_groups(std::vector<comm::Communicator*>& groups);

 private:
  /// On the heap, because gathered_ and gradients_ have pointers to the shards.
  std::unique_ptr<ParameterGroupShards> shards_;
  GatheredState gathered_;
  GradientState gradients_;
};

// The following functions compare state between ranks. They send only CPU values and wait for no
// GPU.

/// Checks that the ranks of each process group called the same collectives: first groups in
/// `sharding`, then in `replicating`, small groups first. Throws Error after all comparisons,
/// PeerError at once. Collective over all groups, in the same order on all ranks.
void agree_on_calls(const std::vector<comm::Communicator*>& sharding,
                    const std::vector<comm::Communicator*>& replicating);

/// Frees the gathered memory of a parameter group on all ranks if any rank has written to its
/// shards. `groups` must be the same on all ranks. Collective over the meshes of `groups`. Throws
/// PeerError.
void free_outdated(std::vector<ParameterGroup*> groups, CommContext& context);

/// The ranks agree on which parameters of `groups` any rank used. A used parameter gets a gradient
/// on all ranks. The first call also chooses the process groups of pending sums (PartialGradGroup).
/// Collective over the parameters' meshes. Throws PeerError.
void agree_on_use(const std::vector<ParameterGroup*>& groups);

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END

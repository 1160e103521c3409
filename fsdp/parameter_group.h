#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective_hooks.h"
#include "communication.h"
#include "data_mesh.h"
#include "encoded_gather.h"
#include "gradient_reduction.h"
#include "neighbour_shard.h"
#include "packing.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/fully_shard.h"
#include "whole_tensors.h"

namespace tessera::fsdp {

class UseAgreement;

/// Parameters of one type, on one mesh, that are gathered in one all-gather and reduced in one
/// reduce-scatter.
///
/// The shards lie one after another in one flat buffer, each padded to rank 0's size, so that with
/// equal types the buffer itself is what all-gather sends. The whole tensors lie in one storage,
/// which is freed when the group is resharded; where the communicator moves groups in place and all
/// shards are rows, it gathers straight into them. On a mesh of one rank nothing is communicated,
/// and without a change of type or device nothing copied: the whole tensor is the shard.
class ParameterGroup {
 public:
  /// All of one type.
  ParameterGroup(std::vector<ShardedParameter> parameters, DataMesh mesh, const Options& options,
                 std::shared_ptr<const CollectiveHooks> hooks);

  /// What messages call the unit: "unit 'layers.3'".
  void set_label(std::string label) { label_ = std::move(label); }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const DataMesh& mesh() const { return mesh_; }

  /// Takes over tensors that were put into the slots since and lays the shards out. To be called
  /// before the first unshard of an iteration. Throws Error, naming them, for parameters that are
  /// still on the meta device or on another one than they should be. Otherwise collective.
  void prepare(Communication& communication);

  bool unsharded() const { return unsharded_; }
  /// Starts the all-gather, unless there is nothing to gather. Collective.
  void start_unshard(Communication& communication);
  /// Puts the whole tensors into the slots. Collective unless started before.
  void unshard(Communication& communication);
  /// Puts the shards into the slots and frees what is gathered.
  void reshard(Communication& communication);
  /// The same where the shards will be gathered again as they are: keeps this rank's piece for its
  /// neighbours, if so asked.
  void reshard_for_now(Communication& communication);
  /// Whether pieces are kept for all micro-batches of a step, not for one backward.
  bool keeps_pieces() const { return mesh_.replica && neighbours_.enabled(); }
  /// Whether there is one, of the shards as they are now.
  bool has_valid_piece() const;
  void drop_piece() { neighbours_.drop(); }
  /// Frees what is gathered, whether that has succeeded or not.
  void discard(Communication& communication);

  /// Adds the groups over which it gathers and reduce-scatters.
  void add_sharding_groups(std::vector<comm::Communicator*>& groups);
  /// Adds the one, if any, over which it all-reduces.
  void add_replica_groups(std::vector<comm::Communicator*>& groups);

  /// Whether a whole parameter has a gradient.
  bool has_gradients() const;
  /// Forgets what a backward that failed left in the whole parameters.
  void drop_gradients();
  /// And all that earlier ones have made of them, reduced or not.
  void drop_all_gradients();
  /// Sets the whole gradients aside, to be added to those of later backwards.
  void keep_gradients();
  /// Whether some were set aside, or wait for the replicas, that a reduction now would complete.
  /// The same on all ranks, whichever parameters they used.
  bool awaits_reduction() const;
  /// Forgets what was set aside for a parameter of this group.
  void drop_kept_gradient(const nn::ParameterSlot& slot);
  /// Adds the parameters whose gradients were handed out since their use was settled.
  void add_accumulated(UseAgreement& agreement);
  /// Starts the reduction of the trainable parameters' gradients, and of what was set aside.
  /// Collective.
  void start_reduce(Communication& communication);
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(Communication& communication);
  /// Forgets it.
  void forget_reduction(Communication& communication);

  /// What the sum of all ranks' gradients is divided by; at first the number of ranks.
  void set_gradient_divisor(double divisor) { gradient_divisor_ = divisor; }
  /// Under HSDP, false: reductions leave out the replicas until one does not.
  void set_all_reduce(bool all_reduce) { all_reduce_ = all_reduce; }
  /// No part of the division comes before the sum.
  void set_force_sum(bool force) { force_sum_ = force; }
  /// True: the next gathers go to the compute lane.
  void set_unshard_async_op(bool async_op) { async_op_ = async_op; }

 private:
  const ShardHome& home() const { return parameters_.front().home(); }
  /// Whether the whole tensors are the shards.
  bool shares_memory() const {
    return mesh_.shard.size() == 1 && compute_dtype_ == dtype_ && home().device == device_;
  }
  bool has_flat() const { return mesh_.shard.size() > 1 || home().pinned; }
  bool gathers_in_place() const;
  bool laid_out() const;
  std::vector<ShardedParameter*> all_parameters();
  /// A model may be converted after it was sharded. Throws Error if only a part of the group was.
  void take_types();
  void check_devices() const;
  void lay_out_shards();
  void make_whole_tensors();

  void choose_lane(Communication& communication);
  void follow_compute(Communication& communication) const;
  at::Tensor encode_shards();
  void start_gather_in_place();
  void start_gather_packed(Communication& communication);
  void wait_for_gather(Communication& communication);
  void discard_gather();
  void fill_whole_tensors(Communication& communication);
  void free_whole_tensors(Communication& communication);
  void show_sharded(Communication& communication);
  void free_gathered(Communication& communication);
  std::uint64_t shard_versions() const;

  std::vector<ShardedParameter> parameters_;
  DataMesh mesh_;
  c10::Device device_;  ///< of computation
  MixedPrecisionPolicy mp_policy_;
  ExtensionFunction extension_;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  c10::ScalarType compute_dtype_ = c10::ScalarType::Undefined;
  c10::ScalarType reduce_dtype_ = c10::ScalarType::Undefined;
  std::shared_ptr<const CollectiveHooks> hooks_;
  std::string label_;

  std::vector<Segment> segments_;
  at::Tensor flat_;  ///< this rank's shards
  WholeTensors whole_;
  NeighbourShard neighbours_;
  std::uint64_t gathered_versions_ = 0;   ///< of the shards, when they were gathered last
  std::optional<EncodedGather> encoded_;  ///< empty: values are gathered
  bool unsharded_ = false;

  at::Tensor send_;                             ///< of the all-gather under way
  std::optional<BufferPool::Buffer> sent_;      ///< its memory, if the group's
  std::optional<BufferPool::Buffer> gathered_;  ///< (ranks, flat numel), unless in place
  comm::WorkPtr gather_;
  struct KeptGradient {
    WholeGradient sum;
    bool expected = false;  ///< the parameter was trainable, though this rank may not have used it
  };
  std::vector<KeptGradient> kept_gradients_;  ///< beside parameters_, or empty
  std::optional<GradientReduction> reduction_;
  double gradient_divisor_;
  bool all_reduce_ = true;
  bool force_sum_ = false;
  bool async_op_ = false;
  comm::Lane gather_lane_ = comm::Lane::kAllGather;  ///< of what was gathered last
};

}  // namespace tessera::fsdp

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "buffers.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/parameter.h"

namespace tessera::fsdp {

/// How fully_shard will shard one parameter. All fields are checked before the parameter changes.
struct ParameterSpec {
  std::string name;  ///< name of the parameter within the unit
  nn::SlotPtr slot;
  DataMesh mesh;
  /// The tensor dimension that is split over mesh.shard; nullopt: replicated over mesh.shard.
  std::optional<std::int64_t> dim;
  std::int64_t parts = 1;  ///< number of equal blocks along `dim`, each split separately
  ShardingSpec sharding;   ///< spec of the persistent tensor
  ShardHome home;
};

/// Returns the number of blocks of a fused weight whose blocks tensor parallelism has split
/// separately; otherwise 1. Blocks are along `dim`.
std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim);

/// Returns the sharding spec of `tensor` after FSDP has split dimension `dim` (nullopt: none) over
/// mesh.shard. A tensor-parallel tensor gets a spec on the joined mesh. Throws Error for a tensor
/// that cannot be split further; `name` is for the message.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name);

/// This rank's gradient of an unsharded parameter, as a local tensor.
struct UnshardedGradient {
  at::Tensor local;  ///< the gradient; undefined if this rank computed no gradient
  /// The process group over which the gradient must still be summed. nullptr: the gradient is
  /// complete.
  comm::Communicator* pending = nullptr;
  bool used = false;   ///< whether this rank computed a gradient
  double divisor = 1;  ///< the number by which `local` was divided before an fp16 sum
};

/// Converts `gradient` to a term of a sum over the ranks of `pending` (nullptr: to a complete
/// gradient). A sum, if needed, has dtype `dtype` and is collective over the tensor-parallel ranks.
UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending,
                            c10::ScalarType dtype);

/// Adds `gradient` to `sum`, in dtype `dtype` and scaled to the divisor of `sum`. The result is a
/// pending sum if either term is a pending sum.
void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient, c10::ScalarType dtype);

/// The process group over which a parameter's gradients must still be summed. A rank only knows the
/// layout of its own gradient, so the ranks agree on the process group once.
class PartialGradGroup {
 public:
  /// `spec`: the spec that tensor parallelism gave the parameter; nullopt for a plain parameter.
  explicit PartialGradGroup(const std::optional<ShardingSpec>& spec);

  /// Returns the process group of the sum; nullptr if no sum is needed. Before the agreement: a
  /// process group for which a sum may become necessary.
  comm::Communicator* group() const { return group_; }
  /// Records over which process group this rank's `gradient` must be summed.
  void note(const UnshardedGradient& gradient);

  /// Returns one flag for each possible process group: whether this rank needs a sum over the
  /// group. Empty after the agreement.
  std::vector<std::uint8_t> flags() const;
  /// Chooses the process group. `flags`: the maximum of flags() over all ranks.
  void agree(std::span<const std::uint8_t> flags);

 private:
  std::vector<comm::Communicator*> candidates_;
  comm::Communicator* group_ = nullptr;
  comm::Communicator* observed_ = nullptr;
};

/// The placeholder in `.grad` of a sharded parameter. Owns the parameter's unreduced gradients,
/// which the program drops with zero_grad() or `mutable_grad().reset()`. Other operators throw
/// Error.
class UnreducedGradient final : public nn::PlaceholderGradient {
 public:
  /// `earlier`: the gradient that was in `.grad`, possibly undefined. `name`: the parameter's name
  /// in messages.
  UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier, std::string name);

  /// The unsharded gradient that waits for a later reduction; nullopt if none waits. `local` is
  /// undefined if this rank computed no gradient.
  std::optional<UnshardedGradient> unsharded;
  /// The gradient that was summed over the shard dimension but not yet over replicas (HSDP).
  UnshardedGradient scattered;
  /// Whether reductions of this parameter's gradient are in progress.
  bool expects = false;
  at::Tensor reduced;  ///< the sum of earlier backwards, reduced over all ranks

  /// Whether no gradient waits for a reduction.
  bool is_settled() const { return !unsharded && !scattered.local.defined() && !expects; }

  [[noreturn]] void refuse() const override;
  /// Returns true if `op` is zero_, detach or add_, which run on the placeholder; otherwise false.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void release_resources() override;

 private:
  void drop();

  std::string name_;
};

/// Returns `gradient` (`.grad` of a sharded parameter) if it is a placeholder; otherwise nullptr.
UnreducedGradient* unreduced(const at::Tensor& gradient);

/// One parameter of a unit: its nn::ParameterSlot, its sharded tensor, and the unsharded tensor for
/// forward and backward. Under tensor parallelism the unsharded tensor is still distributed over
/// the tensor-parallel ranks.
class ShardedParameter {
 public:
  /// Splits the tensor in `spec.slot` and puts this rank's shard into the slot, on the device of
  /// `spec.home` (a meta shard stays). Not collective.
  explicit ShardedParameter(const ParameterSpec& spec);

  const std::string& name() const { return name_; }
  const nn::SlotPtr& slot() const { return slot_; }
  const ShardShape& shape() const { return shape_; }
  c10::ScalarType dtype() const { return sharded_.scalar_type(); }
  c10::Device device() const { return sharded_.device(); }
  const ShardHome& home() const { return home_; }
  bool trainable() const { return sharded_.requires_grad(); }

  /// How a backward for selected parameters (autograd::grad, or backward with `inputs`) treats this
  /// parameter.
  enum class Request : std::uint8_t {
    kNone,     ///< default: no backward for selected parameters runs
    kReturn,   ///< the caller gets the gradient; the post-accumulate-grad hook is not called
    kAdd,      ///< the gradient is added to `.grad`
    kLeaveOut  ///< the gradient is neither reduced nor stored
  };
  void set_request(Request request) { request_ = request; }
  bool left_out() const { return request_ == Request::kLeaveOut; }

  /// Returns the mesh of all ranks that have a part or a copy of the parameter.
  const DeviceMesh& holders() const { return sharding_.mesh; }
  /// The sharded tensor, a distributed tensor that exists as long as the parameter.
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& shard() const { return local_tensor(sharded_); }
  /// The tensor for forward and backward; undefined until set_unsharded() is called.
  const at::Tensor& unsharded() const { return unsharded_; }

  /// An id of the full tensor that the shard is a part of: a hash of values or of the random seed.
  /// Equal on all ranks with parts of this tensor. 0: unknown, or no part on this rank.
  std::int64_t origin() const;
  /// Returns a number that grows with each write to the shard, as autograd's version counter does.
  std::uint64_t version() const;
  /// Whether nn::to_empty or a load has put another tensor into slot().
  bool is_replaced() const;
  /// If the program has put a new tensor into slot(), makes this tensor the shard and returns true.
  /// Throws Error if the tensor, or new data of the old shard, has another layout.
  bool adopt();
  /// Makes the unsharded tensor, an autograd leaf whose local part is `local`.
  void set_unsharded(const at::Tensor& local);
  /// A function that makes the autograd node for the gradient of the sharded tensor
  /// (nn::StandInGradient).
  using MakeStandIn =
      std::function<tessera::detail::NodePtr<tessera::detail::Node>(const at::Tensor& sharded)>;
  void set_stand_in(MakeStandIn make);

  /// `notice` is called once in each backward, just before the gradient of the unsharded tensor is
  /// added to `.grad`.
  void set_gradient_notice(std::function<void()> notice) { notice_ = std::move(notice); }

  /// Counts writes to the shard since the last call as a write to the unsharded tensor. Autograd
  /// then rejects a backward through the old values.
  void count_writes();

  /// Called when forward begins to use the unsharded tensor, and when unshard() has installed it.
  void begin_use();
  bool written_in_use() const;

  void install_sharded() { slot_->swap(sharded_); }
  void install_unsharded();
  /// Stores in the parameter slot whether the unsharded tensor has valid values.
  void set_gathered(bool gathered) { slot_->role.gathered = gathered; }

  /// Returns the reduced gradient of the shard; undefined if there is no gradient.
  const at::Tensor& gradient() const;
  /// To be called when a reduction begins. Results must arrive (accumulate() or
  /// leave_to_replicas()) in the order in which the reductions began.
  void expect();
  /// To be called when backward has ended. Puts a placeholder into `.grad` while reductions are in
  /// progress. If the program drops the placeholder, the results are discarded.
  void mark_expected();
  /// Adds the plain tensor `gradient` (the shard's shape, any dtype and device) to `.grad` of the
  /// sharded parameter, and runs the hooks. `used`: whether this rank contributed. For an offloaded
  /// shard, arrive() completes the addition. Throws Error for another layout in `.grad` or a hook's
  /// result.
  void accumulate(const at::Tensor& gradient, bool used);
  /// Completes accumulate() for a shard in CPU memory (offload_policy), after the CPU has waited
  /// for the gradient's copy.
  void arrive();
  /// Drops the gradients that arrive() would add; to be called after a failed backward.
  void forget_arrivals();
  /// Drops the reduced gradient, and the gradients that wait to be reduced.
  void drop_gradient();
  bool has_hooks() const;
  /// Whether this rank contributed to the gradients accumulated since the last settle_use().
  bool used() const { return used_; }
  /// Replaces accumulate() if this rank has the whole tensor and did not use the parameter. Adds no
  /// gradient and calls no hook.
  void skip_unused();
  /// To be called when the accumulated gradient is complete. `by_any_rank`: whether any rank used
  /// the parameter; if not, removes new gradients. If only other ranks used the parameter, this
  /// rank gets a zero gradient.
  void settle_use(bool by_any_rank);

  // Gradients in `.grad` that wait for a later reduction (UnreducedGradient).

  /// Adds an unsharded gradient, in dtype `dtype`, to the gradient that waits to be reduced.
  void add_unreduced(const UnshardedGradient& gradient, c10::ScalarType dtype);
  /// Whether add_unreduced() has stored a gradient (possibly undefined) and the program has not
  /// dropped the gradient since.
  bool has_unreduced() const;
  UnshardedGradient take_unreduced();
  /// To be called when backward reaches the unit. Moves the accumulated gradient into `.grad` of
  /// the unsharded tensor, where autograd adds to the gradient. Does nothing if the next gradient
  /// can be a pending sum.
  void restore_accumulated_grads();
  /// Removes the gradient from the unsharded tensor and returns the gradient; a pending sum over
  /// one process group stays pending. Redistributes a gradient of another layout (collective, in
  /// `dtype`). Throws Error if the program has dropped a restored gradient.
  UnshardedGradient take_unsharded(c10::ScalarType dtype);
  /// Drops the gradient that a failed backward left in the unsharded tensor. Restored gradients
  /// stay accumulated.
  void drop_unsharded();
  /// Adds a gradient of the shard to the gradient that waits to be summed over replicas.
  void leave_to_replicas(const UnshardedGradient& gradient, c10::ScalarType dtype);
  bool has_left_to_replicas() const;
  UnshardedGradient take_left_to_replicas();

  /// The process group for this parameter's pending sums of gradients.
  PartialGradGroup& partial_group() { return partial_group_; }

 private:
  /// What accumulate() has done to `.grad` of the sharded parameter since settle_use().
  enum class Accumulation : std::uint8_t {
    kSettled,  ///< no gradient was added
    kStarted,  ///< no gradient existed; the first gradient was stored
    kAdded,    ///< a gradient was added to an existing gradient
  };

  UnreducedGradient& unreduced_gradient();
  void settle_unreduced();
  void notice_drop();
  bool arrives();
  void settle_expected();
  at::Tensor& gradient_place();
  at::Tensor at_home(const at::Tensor& gradient) const;
  at::Tensor distributed(const at::Tensor& shard) const;
  at::Tensor call_hooks(const at::Tensor& gradient) const;
  void check_layout(const char* what, const at::Tensor& tensor) const;
  void call_hook();
  void install_stand_in();
  nn::SlotPtr slot_;
  std::string name_;
  ShardShape shape_;
  ShardHome home_;
  ShardingSpec sharding_;
  std::optional<ShardingSpec> unsharded_spec_;  ///< spec of unsharded_; nullopt for a plain tensor
  PartialGradGroup partial_group_;
  bool comes_complete_;  ///< whether gradients of unsharded_ need no further sum over ranks
  at::Tensor sharded_;
  at::Tensor unsharded_;
  MakeStandIn make_stand_in_;
  std::function<void()> notice_;
  tessera::detail::NodePtr<tessera::detail::Node> stand_in_;
  Request request_ = Request::kNone;
  std::uint64_t counted_version_ = 0;  ///< the shard's version when count_writes() last ran
  std::uint64_t used_version_ = 0;     ///< the unsharded tensor's version when begin_use() last ran
  int expected_ = 0;                   ///< number of reductions of the gradient in progress
  /// The program has dropped the results of the `discarded_` oldest reductions in progress.
  int discarded_ = 0;
  const UnreducedGradient* marked_expected_ = nullptr;
  at::Tensor restored_from_;          ///< the placeholder from which the gradient was restored
  std::vector<at::Tensor> arriving_;  ///< gradients in CPU memory that arrive() adds to `.grad`
  bool awaited_ = false;              ///< whether arrive() must still complete accumulate()
  Accumulation accumulation_ = Accumulation::kSettled;
  bool used_ = false;  ///< whether this rank used the parameter; agree_on_use() exchanges used_
};

}  // namespace tessera::fsdp

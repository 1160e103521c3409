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

/// The sharding of one parameter, decided and checked before the parameter is changed.
struct ParameterSpec {
  std::string name;  ///< name of the parameter within the unit
  nn::SlotPtr slot;
  DataMesh mesh;
  /// The dimension that is split over mesh.shard; nullopt if the parameter is replicated over
  /// mesh.shard.
  std::optional<std::int64_t> dim;
  std::int64_t parts = 1;  ///< number of equal blocks of `dim`, each split separately
  ShardingSpec sharding;   ///< the sharding spec of the persistent tensor
  ShardHome home;
};

/// Returns the number of equal blocks along `dim` of `tensor` that tensor parallelism has split
/// separately (a fused weight). The number is 1 for any other tensor.
std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim);

/// Returns the sharding spec of `tensor` after FSDP has split each of its blocks along `dim` over
/// the sharding dimension of `mesh`. FSDP splits a shard of tensor parallelism further. `dim`
/// nullopt: `tensor` is replicated over the sharding dimension. The spec of a plain tensor is on
/// `mesh`. The spec of a tensor-parallel tensor is on the mesh that joins both meshes, a slice of
/// their common root. Throws Error, with `name` as the parameter's name, for a tensor that cannot
/// be split further in this way.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name);

/// The local part of the gradient of an unsharded parameter, on this rank.
struct UnshardedGradient {
  at::Tensor local;  ///< the gradient; undefined if this rank computed no gradient
  /// The process group over which the gradient must still be summed. nullptr: the gradient is
  /// complete.
  comm::Communicator* pending = nullptr;
  bool used = false;   ///< whether this rank computed a gradient; another rank can store it
  double divisor = 1;  ///< the number by which the gradient was divided before an fp16 sum
};

/// Returns `gradient` as a term of the sum over `pending`, or as a complete gradient if `pending`
/// is nullptr. If a sum must be computed at once, the call is collective over the tensor-parallel
/// ranks, and the sum has type `dtype`.
UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending,
                            c10::ScalarType dtype);

/// Adds `gradient`, in type `dtype` and scaled to the divisor of `sum`, to `sum`. If only `sum` or
/// only `gradient` is a pending sum over a process group, the result is pending over that group.
void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient, c10::ScalarType dtype);

/// The process group over which the gradients of a parameter must still be summed when the
/// gradients are reduced. All ranks that reduce the gradient must compute the same sum, but each
/// rank knows only the layout of its own gradient. So the ranks agree on the group once.
class PartialGradGroup {
 public:
  /// `spec`: the spec that tensor parallelism gave the parameter; nullopt for a plain parameter.
  explicit PartialGradGroup(const std::optional<ShardingSpec>& spec);

  /// The process group over which gradients must still be summed; nullptr if no sum is needed.
  /// Before the ranks have agreed: a process group over which a sum can be needed. A sum over this
  /// group leaves a complete gradient correct.
  comm::Communicator* group() const { return group_; }
  /// Records the process group over which this rank's `gradient` must be summed.
  void note(const UnshardedGradient& gradient);

  /// Returns one flag for each process group over which a gradient sometimes needs a sum. The ranks
  /// exchange these flags before agree(). The list is empty once the ranks have agreed.
  std::vector<std::uint8_t> flags() const;
  /// Sets the process group that all ranks chose. `flags`: the maximum over all ranks of flags().
  void agree(std::span<const std::uint8_t> flags);

 private:
  /// The process groups to choose from; empty once the ranks have agreed on one.
  std::vector<comm::Communicator*> candidates_;
  comm::Communicator* group_ = nullptr;
  comm::Communicator* observed_ = nullptr;
};

/// A placeholder in `.grad` of a sharded parameter while gradients of the parameter wait for a
/// later reduction. The placeholder owns these gradients, so the program drops them with zero_grad
/// of an optimizer or module, or with `mutable_grad().reset()`. Other operators on the placeholder
/// throw Error.
class UnreducedGradient final : public nn::PlaceholderGradient {
 public:
  /// `earlier`: the gradient that was in `.grad`; undefined without a gradient. `name`: the
  /// parameter's name in messages.
  UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier, std::string name);

  /// The gradient that was set aside without any reduction; nullopt if no gradient was set aside.
  /// If `local` of the result is undefined, this rank computed no gradient.
  std::optional<UnshardedGradient> unsharded;
  /// The gradient summed over the shard dimension of the mesh but not over replicas (HSDP).
  UnshardedGradient scattered;
  /// Whether reductions are in progress whose results will be added to the sharded parameter's
  /// gradient.
  bool expects = false;
  at::Tensor reduced;  ///< the sum of earlier backwards, already reduced over all ranks

  /// Whether no gradient waits for a reduction.
  bool is_settled() const { return !unsharded && !scattered.local.defined() && !expects; }

  [[noreturn]] void refuse() const override;
  /// Runs zero_ and detach (for zero_grad) and add_ (for accumulation) on the placeholder.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void release_resources() override;

 private:
  void drop();

  std::string name_;
};

/// Returns the placeholder in `gradient`, the `.grad` of a sharded parameter; nullptr if `gradient`
/// is an ordinary gradient.
UnreducedGradient* unreduced(const at::Tensor& gradient);

/// One parameter of a unit: its nn::ParameterSlot, the persistent sharded tensor, and the unsharded
/// tensor that forward and backward see. "Unsharded" refers to FSDP's mesh dimension: under tensor
/// parallelism the unsharded tensor is still distributed on the other mesh dimensions.
class ShardedParameter {
 public:
  /// Splits the tensor in `spec.slot` and puts this rank's shard into the slot. Moves the shard to
  /// the device of `spec.home` unless the shard is on the meta device. Not collective.
  explicit ShardedParameter(const ParameterSpec& spec);

  const std::string& name() const { return name_; }
  const nn::SlotPtr& slot() const { return slot_; }
  const ShardShape& shape() const { return shape_; }
  c10::ScalarType dtype() const { return sharded_.scalar_type(); }
  c10::Device device() const { return sharded_.device(); }
  const ShardHome& home() const { return home_; }
  bool trainable() const { return sharded_.requires_grad(); }

  /// What a backward for selected parameters (autograd::grad, or backward with `inputs`) does with
  /// this parameter.
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
  /// The tensor that forward and backward see; undefined until set_unsharded() is called.
  const at::Tensor& unsharded() const { return unsharded_; }

  /// An id of the whole tensor from which the shard's values come. All ranks that have parts of one
  /// tensor have the same id. The id is a hash of a sample of the tensor's values, or comes from
  /// the seed that filled the parameter later. 0: unknown, or this rank has no part of the tensor.
  std::int64_t origin() const;
  /// Returns a number that grows with each write to the shard, as autograd's version counter does.
  std::uint64_t version() const;
  /// Whether nn::to_empty or a load has put another tensor into slot().
  bool is_replaced() const;
  /// Uses a tensor that was put into slot() as the new shard. Returns whether there was a new
  /// tensor. Throws Error if the tensor's layout differs from the shard's layout. Checks the shard
  /// itself in the same way if its data was replaced.
  bool adopt();
  /// Makes the unsharded tensor, an autograd leaf, with the local part `local`.
  void set_unsharded(const at::Tensor& local);
  /// A function that makes the autograd node that computes the gradient of the sharded tensor
  /// (nn::StandInGradient). Each tensor that adopt() takes over needs a new node.
  using MakeStandIn =
      std::function<tessera::detail::NodePtr<tessera::detail::Node>(const at::Tensor& sharded)>;
  void set_stand_in(MakeStandIn make);

  /// Sets a function that each backward calls once, when the gradient of the unsharded tensor is
  /// computed but not yet added to `.grad`.
  void set_gradient_notice(std::function<void()> notice) { notice_ = std::move(notice); }

  /// Counts writes to the shard since the last call as a write to the unsharded tensor. Autograd
  /// then refuses the backward of a forward that ran before the write.
  void count_writes();

  /// Marks the beginning of a use of the unsharded tensor: by forward, or by the program after
  /// unshard.
  void begin_use();
  bool written_in_use() const;

  void install_sharded() { slot_->swap(sharded_); }
  void install_unsharded();
  /// Stores in the parameter slot whether the unsharded tensor has valid values.
  void set_gathered(bool gathered) { slot_->role.gathered = gathered; }

  /// Returns the reduced gradient of the shard; undefined if there is no gradient.
  const at::Tensor& gradient() const;
  /// To be called when a reduction begins whose result accumulate() or leave_to_replicas() will
  /// get. Results arrive in the order in which the reductions began.
  void expect();
  /// To be called when backward has ended. While reductions are still in progress, puts a
  /// placeholder into `.grad`, so that a program that drops the gradient also drops the results of
  /// these reductions.
  void mark_expected();
  /// Adds a gradient of the shard (plain, of any type, on any device) to the sharded parameter's
  /// gradient. Calls the parameter's libtorch hooks: the hooks of register_hook before the addition
  /// (they can change the gradient), the post-accumulate-grad hook after the addition. The copy of
  /// an offloaded shard's gradient to CPU memory is asynchronous: arrive() does the addition and
  /// calls the post-accumulate-grad hook; for hooks of register_hook the CPU waits for the copy.
  /// `used`: this rank contributed to the gradient. Throws Error if the gradient or a
  /// hook's result does not have the layout that the parameter has.
  void accumulate(const at::Tensor& gradient, bool used);
  /// Completes accumulate() for a shard in CPU memory (offload_policy). Before the call, the CPU
  /// must have waited for the copies to CPU memory.
  void arrive();
  /// Drops the gradients that arrive() would add; to be called after a failed backward.
  void forget_arrivals();
  /// Drops the reduced gradient, and the gradients that wait to be reduced.
  void drop_gradient();
  bool has_hooks() const;
  /// Whether this rank contributed to the gradients that were accumulated since the last
  /// settle_use().
  bool used() const { return used_; }
  /// To be called when a reduction has ended on a rank that has the whole tensor and did not use
  /// the parameter. The call adds no gradient and calls no hook.
  void skip_unused();
  /// To be called when the accumulated gradient is complete. If `by_any_rank` is false (no rank
  /// used the parameter), the gradient becomes undefined unless the gradient was defined before. If
  /// only other ranks reduced the gradient, this rank's part is zero.
  void settle_use(bool by_any_rank);

  // The functions from add_unreduced() on are for gradients that wait, in `.grad`
  // (UnreducedGradient), for a later reduction.

  /// Adds an unsharded gradient, in type `dtype`, to the gradient that waits to be reduced.
  void add_unreduced(const UnshardedGradient& gradient, c10::ScalarType dtype);
  /// Whether add_unreduced() was called, even with an undefined gradient, and the program has not
  /// dropped that gradient since.
  bool has_unreduced() const;
  UnshardedGradient take_unreduced();
  /// To be called when backward reaches the unit. If the next gradient only needs to be added to
  /// the accumulated gradient, the accumulated gradient becomes the gradient of the unsharded
  /// tensor. Autograd, or a matrix product instead of autograd (detail::OpenGradient), then adds to
  /// this gradient, until take_unsharded() or drop_unsharded() is called.
  void restore_accumulated_grads();
  /// Takes the gradient off the unsharded tensor, including the gradient from
  /// restore_accumulated_grads(). A sum pending over one process group stays pending. A gradient
  /// with a layout unlike the parameter's is redistributed in type `dtype` (collective). A plain
  /// gradient counts as complete. Throws Error if the program has dropped the restored gradient.
  UnshardedGradient take_unsharded(c10::ScalarType dtype);
  /// Drops the gradient that a failed backward has left in the unsharded tensor. A restored
  /// gradient stays accumulated, with the values that backward has added to the gradient.
  void drop_unsharded();
  /// Adds a gradient of the shard to the gradient that waits to be summed over replicas.
  void leave_to_replicas(const UnshardedGradient& gradient, c10::ScalarType dtype);
  bool has_left_to_replicas() const;
  UnshardedGradient take_left_to_replicas();

  /// The process group over which gradients of this parameter must still be summed when the
  /// gradients are reduced.
  PartialGradGroup& partial_group() { return partial_group_; }

 private:
  /// What accumulate() has done to the sharded parameter's gradient since the last agree_on_use().
  enum class Accumulation : std::uint8_t {
    kSettled,  ///< accumulate() has added no reduced gradient
    kStarted,  ///< there was no gradient; a reduced gradient became the gradient
    kAdded,    ///< accumulate() added a reduced gradient to an existing gradient
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
  bool comes_complete_;  ///< whether no gradient of unsharded_ needs a further sum over ranks
  at::Tensor sharded_;
  at::Tensor unsharded_;
  MakeStandIn make_stand_in_;
  std::function<void()> notice_;
  tessera::detail::NodePtr<tessera::detail::Node> stand_in_;
  Request request_ = Request::kNone;
  std::uint64_t counted_version_ = 0;  ///< the shard's version when count_writes() last ran
  std::uint64_t used_version_ = 0;     ///< the unsharded tensor's version when begin_use() last ran
  int expected_ = 0;                   ///< number of reductions of the gradient in progress
  /// How many reductions in progress (the oldest ones) have results that the program has dropped.
  int discarded_ = 0;
  /// The placeholder that mark_expected() put into `.grad`; nullptr without a placeholder.
  const UnreducedGradient* marked_expected_ = nullptr;
  at::Tensor restored_from_;          ///< the placeholder from which the gradient was restored
  std::vector<at::Tensor> arriving_;  ///< gradients in CPU memory that arrive() adds to `.grad`
  bool awaited_ = false;              ///< whether arrive() has not completed accumulate() yet
  Accumulation accumulation_ = Accumulation::kSettled;
  bool used_ = false;  ///< whether this rank used the parameter; agree_on_use() exchanges used_
};

}  // namespace tessera::fsdp

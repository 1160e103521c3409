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
#include "tessera/nn/detail/gradients.h"
#include "tessera/nn/parameter.h"

namespace tessera::fsdp {

/// All decisions about a parameter before it is sharded, checked: sharding only applies them.
struct ParameterSpec {
  std::string name;  ///< within the unit
  nn::SlotPtr slot;
  DataMesh mesh;
  std::optional<std::int64_t> dim;  ///< that is split over mesh.shard; empty: replicated there
  std::int64_t parts = 1;           ///< equal ones of that dimension, each split (a fused weight)
  ShardingSpec sharding;            ///< of the persistent tensor
  ShardHome home;
};

/// How many equal parts dimension `dim` of `tensor` has, if tensor parallelism has split each of
/// them separately: those of a fused weight. 1 for any other tensor.
std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim);

/// The spec of `tensor` once it is split on `dim` over the mesh's sharding dimension, which becomes
/// the innermost split, of each part (nullopt: once it is replicated there). A plain tensor is then
/// on that mesh; one that tensor parallelism has distributed is on the mesh of both (a slice of
/// their common root). Throws Error, with `name` as the parameter's name, for a tensor that cannot
/// be split further so.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name);

/// The local part of an unsharded parameter's gradient.
struct UnshardedGradient {
  at::Tensor local;  ///< undefined: none came
  /// Other ranks hold terms of it too: to be summed over this group. nullptr: it is complete.
  comm::Communicator* pending = nullptr;
  bool used = false;   ///< a gradient came on this rank, also if another rank holds all of it now
  double divisor = 1;  ///< it was divided by, before a sum in fp16
};

/// The same gradient as a term of the sum over `pending`, or complete if that is nullptr.
/// Collective over tensor parallelism where a sum must be taken at once, in `dtype`.
UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending,
                            c10::ScalarType dtype);

/// Adds `gradient` to `sum`, in `dtype`, divided as the sum is. If one is complete, it becomes a
/// term of the other's sum.
void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient, c10::ScalarType dtype);

/// The group over which the gradients of a parameter are still to be summed when they are reduced.
/// The ranks that reduce them must do the same, but each knows only the layout of its own gradient.
/// So they agree, once.
class PartialGradGroup {
 public:
  /// For a parameter that tensor parallelism has distributed as `spec`; nullopt: plain.
  explicit PartialGradGroup(const std::optional<ShardingSpec>& spec);

  /// nullptr: none. Until the ranks have agreed, a group over which a gradient may be pending. That
  /// is right for complete gradients too, but costs an unnecessary sum.
  comm::Communicator* group() const { return group_; }
  /// A gradient that came pending on this rank.
  void note(const UnshardedGradient& gradient);

  /// This rank's part of the agreement: one flag for each group over which a gradient may be
  /// pending. Empty once they have agreed.
  std::vector<std::uint8_t> flags() const;
  /// `flags`: set if they are set on any rank.
  void agree(std::span<const std::uint8_t> flags);

 private:
  std::vector<comm::Communicator*> candidates_;  ///< empty: agreed
  comm::Communicator* group_ = nullptr;
  comm::Communicator* observed_ = nullptr;
};

/// Stands in `.grad` of a sharded parameter while gradients of it wait for a later reduction. It
/// owns them, so that they are dropped when the program drops the gradient, by any means: zero_grad
/// of an optimizer or module, or `grad = {}`. Other operators on it throw Error.
class UnreducedGradient final : public nn::PlaceholderGradient {
 public:
  /// `earlier`: what was in `.grad`; undefined: nothing. `name`: what messages call the parameter.
  UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier, std::string name);

  /// The gradient that was set aside, not reduced at all. nullopt: nothing was set aside; an
  /// undefined gradient in it: this rank had none.
  std::optional<UnshardedGradient> unsharded;
  /// Summed over the ranks that shard, and not over replicas.
  UnshardedGradient scattered;
  /// Reductions are under way whose results are to be added.
  bool expects = false;
  at::Tensor reduced;  ///< sum of earlier backwards, in the parameter's layout

  /// Whether nothing waits any more.
  bool is_settled() const { return !unsharded && !scattered.local.defined() && !expects; }

  [[noreturn]] void refuse() const override;
  /// Runs zero_ and detach, which zero_grad calls, and add_, by which autograd accumulates.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void release_resources() override;

 private:
  void drop();

  std::string name_;
};

/// `.grad` of a sharded parameter as one, or nullptr.
UnreducedGradient* unreduced(const at::Tensor& gradient);

/// One parameter of a unit: the slot, the sharded tensor that persists in it, and the unsharded
/// tensor that forward and backward see. "Unsharded" means over FSDP's mesh dimension: under tensor
/// parallelism it is still distributed on the other ones.
class ShardedParameter {
 public:
  /// Splits the tensor in the slot and leaves this rank's shard there, moved to the spec's home
  /// unless it is on the meta device. Not collective.
  explicit ShardedParameter(const ParameterSpec& spec);

  const std::string& name() const { return name_; }
  const nn::SlotPtr& slot() const { return slot_; }
  /// The shape of the unsharded tensor's local part.
  const ShardShape& shape() const { return shape_; }
  c10::ScalarType dtype() const { return sharded_.scalar_type(); }
  c10::Device device() const { return sharded_.device(); }
  const ShardHome& home() const { return home_; }
  bool trainable() const { return sharded_.requires_grad(); }

  /// What a backward for selected parameters does with this one.
  enum class Request : std::uint8_t {
    kNone,     ///< it is a whole backward
    kReturn,   ///< the caller takes the gradient: the post-accumulate-grad hook is not called
    kAdd,      ///< to the gradient
    kLeaveOut  ///< nothing is reduced or kept of it
  };
  void set_request(Request request) { request_ = request; }
  bool left_out() const { return request_ == Request::kLeaveOut; }

  /// The mesh of all ranks that hold a part or a copy of the parameter.
  const DeviceMesh& holders() const { return sharding_.mesh; }
  /// The distributed tensor that persists, and its local part: of shape().shard_sizes(rank).
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& shard() const { return local_tensor(sharded_); }
  /// The unsharded tensor; undefined until set_unsharded().
  const at::Tensor& unsharded() const { return unsharded_; }

  /// Identifies the whole tensor that the shard's values are a part of: equal on ranks that hold
  /// parts of one tensor. Derived from a sample of the values that it was cut from, or from the
  /// seed that filled it since. 0: unknown, or this rank has no part.
  std::int64_t origin() const;
  /// Grows with each write to the shard that autograd sees.
  std::uint64_t version() const;
  /// Whether another tensor was put into the slot (nn::to_empty, a load).
  bool is_replaced() const;
  /// Takes over such a tensor: true if there was one. Throws Error if its layout differs from the
  /// shard's, also for the shard itself if its data was replaced.
  bool adopt();
  /// Makes the unsharded tensor, an autograd leaf, around its local part.
  void set_unsharded(const at::Tensor& local);
  /// How autograd finds the gradient of the sharded tensor (nn::StandInGradient), also of a tensor
  /// that adopt() takes over.
  using MakeStandIn =
      std::function<tessera::detail::NodePtr<tessera::detail::Node>(const at::Tensor& sharded)>;
  void set_stand_in(MakeStandIn make);

  /// Counts what was written to the shard since the last call as a write to the unsharded tensor,
  /// so that autograd refuses the backward of a forward before it, as on one rank.
  void count_writes();

  /// Forward, or the program after unshard, begins to use the unsharded tensor; whether it was
  /// written since, but for count_writes().
  void begin_use();
  bool written_in_use() const;

  /// Puts the shard, or the unsharded tensor, into the slot.
  void install_sharded() { slot_->swap(sharded_); }
  void install_unsharded();
  /// Tells the slot whether the unsharded tensor has the values.
  void set_gathered(bool gathered) { slot_->set_gathered(gathered); }

  /// The reduced gradient; undefined: none.
  const at::Tensor& gradient() const;
  /// A reduction has begun whose result accumulate() or leave_to_replicas() will bring. Results
  /// come in the order in which they were begun.
  void expect();
  /// Backward has ended. Gradients that it has left under way are represented in `.grad` like
  /// waiting ones, so that they are dropped if the program drops the gradient.
  void mark_expected();
  /// Adds a gradient of the shard (plain, of any type, on any device) to the sharded parameter's,
  /// and calls its libtorch hooks: those of register_hook before, which may change it, the
  /// post-accumulate-grad hook after. For an offloaded shard, addition and the latter hook wait for
  /// arrive(), since the copy runs beside the host; register_hook's run at once, and the host waits
  /// for them. `used`: this rank contributed to it. Throws Error if the layout of the gradient, or
  /// of a hook's result, differs from the parameter's.
  void accumulate(const at::Tensor& gradient, bool used);
  /// The host has waited for the copies of accumulate(): completes what was left for them.
  void arrive();
  /// A backward has failed: gradients that it left are not added any more.
  void forget_arrivals();
  /// Forgets the gradient, and what waits to be reduced.
  void drop_gradient();
  /// Whether this rank contributed to what was accumulated since settle_use().
  bool used() const { return used_; }
  /// The reduction has ended, and this rank, which holds the whole tensor, did not
  /// use the parameter: nothing is accumulated and no hook is called.
  void skip_unused() { arrives(); }
  /// The accumulated gradient is complete. If no rank used the parameter, the gradient becomes as
  /// undefined as it was before. If only other ranks reduced it, this rank's part is zero.
  void settle_use(bool by_any_rank);

  // Gradients that wait for a later reduction, in `.grad` (see UnreducedGradient).

  /// Adds an unsharded gradient, in `dtype`, to what waits to be reduced.
  void add_unreduced(const UnshardedGradient& gradient, c10::ScalarType dtype);
  /// Whether keep() was called, with whatever gradient, and the program has not dropped it.
  bool has_unreduced() const;
  UnshardedGradient take_unreduced();
  /// Backward comes to the unit. Where no more than an addition is due, what is kept becomes the
  /// gradient of the unsharded tensor, so that autograd, or a product in its place
  /// (detail::OpenGradient), adds to it. Until take_unsharded() or drop_unsharded().
  void restore_accumulated_grads();
  /// Takes the gradient of the unsharded tensor off it, with what was lent, which is kept no more.
  /// A sum over one group stays pending; a gradient with another layout than the parameter is
  /// redistributed in `dtype`, which is collective, and a plain one is whole. Throws Error where
  /// the program has dropped what was lent.
  UnshardedGradient take_unsharded(c10::ScalarType dtype);
  /// Forgets the gradient that a failed backward has left in the unsharded tensor. What was lent
  /// stays kept, with what has been added to it.
  void drop_unsharded();
  /// Adds a gradient of the shard to what waits to be summed over replicas.
  void leave_to_replicas(const UnshardedGradient& gradient, c10::ScalarType dtype);
  bool has_left_to_replicas() const;
  UnshardedGradient take_left_to_replicas();

  /// The sum that the ranks' gradients still need when they are reduced.
  PartialGradGroup& partial_group() { return partial_group_; }

 private:
  /// What accumulate() has done since the ranks last agreed on which parameters they used.
  enum class Accumulation : std::uint8_t {
    kSettled,  ///< nothing
    kStarted,  ///< made a gradient where there was none
    kAdded,    ///< added to an earlier one
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
  std::optional<ShardingSpec> unsharded_spec_;  ///< empty: the unsharded tensor is plain
  PartialGradGroup partial_group_;
  bool comes_complete_;  ///< no gradient of the unsharded tensor can be a pending sum
  at::Tensor sharded_;
  at::Tensor unsharded_;
  MakeStandIn make_stand_in_;
  tessera::detail::NodePtr<tessera::detail::Node> stand_in_;
  Request request_ = Request::kNone;
  std::uint64_t counted_version_ = 0;  ///< the shard's, as the unsharded tensor has counted it
  std::uint64_t used_version_ = 0;     ///< the unsharded tensor's, when its use began
  int expected_ = 0;                   ///< reductions under way
  int discarded_ = 0;                  ///< the program dropped the first so many of these
  /// What represented them in `.grad` when a backward ended; nullptr: nothing.
  const UnreducedGradient* marked_expected_ = nullptr;
  at::Tensor restored_from_;          ///< the UnreducedGradient that lends; undefined: none
  std::vector<at::Tensor> arriving_;  ///< on the host, to be added to the gradient
  bool awaited_ = false;              ///< arrive() has something to do
  Accumulation accumulation_ = Accumulation::kSettled;
  bool used_ = false;  ///< on this rank; what the ranks tell each other
};

}  // namespace tessera::fsdp

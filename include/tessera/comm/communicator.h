#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/placement.h"

namespace at {
class Tensor;
}
namespace c10 {
struct TensorOptions;
}

namespace tessera::comm {

/// A collective failed because of a peer: it died, gave up or did not come in time. The cause is
/// elsewhere: among the errors of several ranks, another kind is the one to look at.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// A collective under way.
class Work {
 public:
  virtual ~Work() = default;
  /// Until the results may be read: on CPU the caller blocks; on CUDA the current stream waits.
  virtual void wait() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

/// The collectives of one group, seen from one rank of it. Every call is collective: all ranks of
/// the group make the same calls in the same order. Tensors are contiguous and on the group's
/// device. Calls are asynchronous: keep the tensors alive and unchanged until Work::wait().
/// A peer's death, its giving up and a time-out throw PeerError from the call or from wait(); a bad
/// argument throws Error.
///
/// Gradient: none; these act below autograd (dtensor/ has the differentiable operations).
/// Thread safety: one thread at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// output [size * n] = the inputs [n] of ranks 0, 1, ... one after another.
  virtual WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input);
  /// tensor = the reduction of all ranks' tensors.
  virtual WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op);
  /// output [n] = part `rank` of the reduction of all ranks' inputs [size * n].
  virtual WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);
  /// Flat elements: input_counts[r] go to rank r, output_counts[r] come from rank r.
  virtual WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                             std::span<const std::int64_t> output_counts,
                             std::span<const std::int64_t> input_counts);
  /// tensor = rank `root`'s tensor.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root);
  /// Several all-gathers as one collective, of one type: outputs[i] [size * n_i] = the inputs[i]
  /// [n_i] of ranks 0, 1, ... This default packs them into one buffer, and so copies.
  virtual WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs);
  /// Several reduce-scatters as one collective, of one type: outputs[i] [n_i] = part `rank` of the
  /// reduction of all ranks' inputs[i] [size * n_i]. This default packs them.
  virtual WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs, ReduceOp op);
  /// Whether groups are moved from and to where they lie, without packing.
  virtual bool moves_groups_in_place() const { return false; }
  /// A flat tensor of `numel` elements, not initialised, for this group's collectives: with NCCL in
  /// memory that it has registered, if the device can; this default just allocates. Collective.
  virtual at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options);
  /// Returns when all ranks have called it.
  virtual void barrier();
  /// Sets the flags that any rank has set: bytes of 0 or 1, as many on all ranks. Goes between the
  /// hosts, waits for no device and is not counted. This default reduces a CPU tensor.
  virtual void any_rank(std::span<std::uint8_t> flags);
  /// What the next calls are for ("unit 'layers.3'"; "": nothing in particular): part of the
  /// messages about them. Must be the same on all ranks: shared memory compares it in each call,
  /// the other back ends in agree_on_calls() and, with TESSERA_DEBUG=1, by a small collective ahead
  /// of each all-gather and reduce-scatter.
  virtual void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }
  const std::string& purpose() const { return purpose_; }
  /// Whether ranks that call different collectives, or for different purposes, are told so.
  virtual bool compares_calls() const { return false; }
  /// Compares what the ranks have called for a purpose since the last time. Throws Error on every
  /// rank if that differs, with the first calls that do and the ranks; later calls work. `trouble`:
  /// what this rank will throw anyway, of which its peers are so told; "": nothing. Collective,
  /// over the hosts: waits for no device, and is not counted. Does nothing where every call is
  /// compared.
  virtual void agree_on_calls([[maybe_unused]] const std::string& trouble = {}) {}
  /// Makes peers that wait in a collective of this group fail soon instead of at the time-out.
  virtual void abort() {}
  /// "gloo", "shm", "nccl", "loopback".
  virtual std::string name() const = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_;
  int size_;
  std::string purpose_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Says what the calls of a scope are for.
class PurposeScope {
 public:
  PurposeScope(Communicator& group, std::string purpose) : group_(group) {
    group_.set_purpose(std::move(purpose));
  }
  PurposeScope(const PurposeScope&) = delete;
  PurposeScope& operator=(const PurposeScope&) = delete;
  ~PurposeScope() { group_.set_purpose({}); }

 private:
  Communicator& group_;
};

}  // namespace tessera::comm

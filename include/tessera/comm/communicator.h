#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"

namespace at {
class Tensor;
}
namespace c10 {
struct TensorOptions;
}

TESSERA_API_BEGIN
namespace tessera::comm {

/// A collective failed because of a peer: it died, gave up or did not come in time. The cause is on
/// another rank: among the errors of several ranks, look at the one that is not a PeerError.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// A running collective.
class Work {
 public:
  virtual ~Work() = default;
  /// Returns when the results may be read: on CPU the caller blocks; on CUDA the current stream
  /// waits, and the caller does not. Throws PeerError.
  virtual void wait() = 0;
  /// After wait(): a function that tells whether the device has finished, for the watchdog to call
  /// from its thread; empty if it has. It should hold no tensors.
  virtual std::function<bool()> device_progress() { return nullptr; }
};
/// Shared by all that wait for it.
using WorkPtr = std::shared_ptr<Work>;

/// The collectives of one group, seen from one rank of it. Every call is collective: all ranks of
/// the group make the same calls in the same order. Tensors are contiguous and on the group's
/// device. Calls are asynchronous: keep the tensors alive and unchanged until Work::wait().
/// A peer that dies, gives up or does not come in time makes the call or wait() throw PeerError; a
/// bad argument throws Error. Sizes are numbers of elements.
///
/// Gradient: none; these act below autograd (dtensor/ has the differentiable operations).
/// Thread safety: one thread at a time.
///
/// A back end of your own derives from this class. A collective that it does not override throws
/// Error. A mesh takes its groups from DeviceMesh::from_groups(). This one plays all ranks of a
/// group alone (compiled and run by CommunicatorExample in
/// tests/comm/communicator_example_test.cpp):
///
///   class Done final : public comm::Work {
///     void wait() override {}
///   };
///
///   class Echo final : public comm::Communicator {
///    public:
///     explicit Echo(int size) : Communicator(/*rank=*/0, size) {}
///     std::string name() const override { return "echo"; }
///     comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
///       output.view({size(), -1}).copy_(input.view({1, -1}));
///       return std::make_shared<Done>();
///     }
///   };
///
///   const auto mesh = DeviceMesh::from_groups(comm::fake_world(0, 2), {0, 1},
///                                             MeshShape({2}, {"x"}), {std::make_shared<Echo>(2)});
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
  /// Whether all_gather_group() and reduce_scatter_group() work without packing, on the tensors
  /// where they are.
  virtual bool moves_groups_in_place() const { return false; }
  /// A flat tensor of `numel` elements, not initialised, for this group's collectives. With NCCL it
  /// is in memory that NCCL has registered, if the device can; this default just allocates.
  virtual at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options);
  /// Returns when all ranks have called it.
  virtual void barrier();
  /// Sets the flags that any rank has set: bytes of 0 or 1, equally many on all ranks. They are
  /// exchanged between the hosts: no device is waited for, and no traffic is counted. This default
  /// reduces a CPU tensor.
  virtual void any_rank(std::span<std::uint8_t> flags);
  /// Names the purpose of the next calls, for messages: "unit 'layers.3'"; "": none. Not
  /// collective, but the ranks must pass the same: shared memory compares it in each call, the
  /// other back ends in agree_on_calls() and, with TESSERA_DEBUG=1, by a small collective ahead of
  /// each all-gather and reduce-scatter.
  virtual void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }
  const std::string& purpose() const { return purpose_; }
  /// Whether each call throws Error on ranks that call different collectives, or for different
  /// purposes.
  virtual bool compares_calls() const { return false; }
  /// Compares the calls with a purpose that the ranks have made since the last comparison. If they
  /// differ, every rank throws Error with the first calls that differ and their ranks; the group
  /// can be used afterwards. `local_error`: the message of an error of this rank, reported to the
  /// peers as its last call; "": none. Collective, between the hosts: no device is waited for, and
  /// no traffic is counted. Does nothing in a group that compares_calls().
  virtual void agree_on_calls([[maybe_unused]] const std::string& local_error = {}) {}
  /// Makes peers that wait in a collective of this group fail soon instead of at the time-out.
  virtual void abort() {}
  /// "gloo", "shm", "nccl", "loopback".
  virtual std::string name() const = 0;
  /// Whether the device runs the collectives in the order of their calls, so that wait() blocks no
  /// thread (NCCL). Elsewhere ranks have to wait() in one order.
  virtual bool keeps_order_on_device() const { return false; }
  /// Ends the group after its last call; nothing is called on it afterwards. NCCL's communicator is
  /// closed, for which its other ranks have to come: where they do not within `patience`, it is
  /// aborted and PeerError thrown.
  virtual void shutdown([[maybe_unused]] std::chrono::milliseconds patience) {}
  /// Whether collectives of meta tensors are called, though these have no values: to be counted, in
  /// a group whose other ranks do not exist (fake_world).
  virtual bool takes_meta_tensors() const { return false; }
  /// Bytes that the calls made so far send from this rank to other hosts, as the back end's
  /// algorithms move them. This default counts none.
  virtual std::int64_t link_bytes() const { return 0; }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_;
  int size_;
  std::string purpose_;
};
/// Shared by the world and the meshes that use the group.
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// set_purpose() for the calls of a scope.
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
TESSERA_API_END

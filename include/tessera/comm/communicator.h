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

/// The error of a collective that failed because another rank died, aborted or did not call in
/// time. The other rank's own Error tells the cause. On CUDA the failed collective's kernel can
/// still run, so it is unsafe to free the tensors. Therefore end the process, or abort the group
/// and synchronize the device.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// A running collective.
class Work {
 public:
  virtual ~Work() = default;
  /// Waits for the collective. Call wait() before reading the results of the collective. On a CPU
  /// the calling thread waits; on CUDA only the current stream waits. Throws PeerError.
  virtual void wait() = 0;
  /// May be called only after wait(). Returns a function that tells whether the device has finished
  /// the collective. Returns an empty function if the device has finished already. The watchdog's
  /// thread calls the returned function, which should not hold references to tensors.
  virtual std::function<bool()> device_progress() { return nullptr; }
};
/// A shared pointer to a running collective.
using WorkPtr = std::shared_ptr<Work>;

/// The collectives of one process group, for one of the ranks of the group. Every call is
/// collective: all ranks of the group make the same calls in the same order. Tensors are contiguous
/// and on the group's device. Calls are asynchronous: keep the tensors alive and unchanged until
/// Work::wait(). If another rank dies, aborts or does not call in time, the call or wait() throws
/// PeerError. An invalid argument throws Error. Sizes are numbers of elements.
///
/// Gradient: none. Collectives act below autograd (dtensor/ has the differentiable operations).
/// Thread safety: one thread at a time.
///
/// To write a back end, derive from this class. A collective that the derived class does not
/// override throws Error. Pass objects of the derived class to a mesh with
/// DeviceMesh::from_groups(). The following back end simulates all ranks of a group in one rank
/// (compiled and run by CommunicatorExample in tests/comm/communicator_example_test.cpp):
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

  /// Sets `output` [size * n] to the inputs [n] of ranks 0, 1, ... in rank order.
  virtual WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input);
  /// Sets `tensor` on every rank to the reduction of the tensors of all ranks.
  virtual WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op);
  /// Reduces the inputs [size * n] of all ranks. Sets `output` [n] to n elements of the result,
  /// from index rank * n on.
  virtual WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);
  /// Sends input_counts[r] flat elements to rank r and receives output_counts[r] elements from rank
  /// r.
  virtual WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                             std::span<const std::int64_t> output_counts,
                             std::span<const std::int64_t> input_counts);
  /// Sets `tensor` on every rank to the tensor of rank `root`.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root);
  /// Runs several all-gathers of tensors of one dtype as one collective: sets outputs[i] [size *
  /// n_i] to the inputs[i] [n_i] of ranks 0, 1, ... in rank order. The default implementation packs
  /// the tensors into one buffer, which costs copies.
  virtual WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs);
  /// Runs several reduce-scatters of tensors of one dtype as one collective, of inputs[i] [size *
  /// n_i] into outputs[i] [n_i]. The default implementation packs the tensors into one buffer,
  /// which costs copies.
  virtual WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs, ReduceOp op);
  /// Whether all_gather_group() and reduce_scatter_group() read and write the given tensors
  /// directly, without packing the tensors into a buffer.
  virtual bool moves_groups_in_place() const { return false; }
  /// Whether a reduction with ReduceOp::kAvg costs no more than a reduction with kSum. True for
  /// NCCL, which divides each term before the sum. If the number of ranks is a power of two, kAvg
  /// must give the same bits as a division after kSum, except for subnormal numbers and overflow.
  virtual bool averages_while_reducing() const { return false; }
  /// Returns an uninitialised flat tensor of `numel` elements for this group's collectives. With
  /// NCCL the memory of the tensor is registered with NCCL, if the device supports this. The
  /// default implementation only allocates the tensor.
  virtual at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options);
  /// Blocks the caller until all ranks have called barrier().
  virtual void barrier();
  /// Sets flags[i] to 1 on every rank if flags[i] is 1 on any rank. A flag is a byte with the value
  /// 0 or 1. All ranks pass the same number of flags. The flags are exchanged between CPUs, so the
  /// call waits for no GPU work and counts no traffic. The default implementation all-reduces a CPU
  /// tensor.
  virtual void any_rank(std::span<std::uint8_t> flags);
  /// Sets the purpose of the next collectives of this group: a string for messages, such as "unit
  /// 'layers.3'". Not collective, but all ranks must pass the same string. The shared-memory back
  /// end compares the strings in each collective. Other back ends compare the strings in
  /// agree_on_calls() and, with TESSERA_DEBUG=1, by a small collective before each all-gather and
  /// reduce-scatter.
  virtual void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }
  const std::string& purpose() const { return purpose_; }
  /// Whether each call first compares the ranks' collectives and their purposes (set_purpose()),
  /// and throws Error if the ranks differ.
  virtual bool compares_calls() const { return false; }
  /// Compares the lists of collectives that the ranks have called since the last comparison. The
  /// lists contain only collectives with a purpose (set_purpose()). If the lists differ, every rank
  /// throws Error with the first different collectives and the ranks that called them; the group
  /// can still be used. `local_error`: the message of an error on this rank, shown to all ranks in
  /// place of this rank's next collective; "": none. Collective between CPUs: waits for no GPU work
  /// and counts no traffic. Does nothing in a group for which compares_calls() is true.
  virtual void agree_on_calls([[maybe_unused]] const std::string& local_error = {}) {}
  /// Makes ranks that wait in a collective of this group fail soon instead of at the time-out.
  virtual void abort() {}
  /// The back end's name in messages: "gloo", "shm", "nccl" or "loopback".
  virtual std::string name() const = 0;
  /// Whether the device runs the collectives in the order of their calls and wait() does not block
  /// the calling thread (NCCL). With other back ends all ranks must call wait() in the same order.
  virtual bool keeps_order_on_device() const { return false; }
  /// Closes the group; no method may be called afterwards. An NCCL communicator is closed on all
  /// ranks together. If some rank does not call shutdown() within `patience`, the NCCL communicator
  /// is aborted and PeerError is thrown.
  virtual void shutdown([[maybe_unused]] std::chrono::milliseconds patience) {}
  /// Whether collectives may be called with tensors on the meta device. True in a group whose other
  /// ranks do not exist (fake_world), where the calls are only counted.
  virtual bool takes_meta_tensors() const { return false; }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_;
  int size_;
  std::string purpose_;
};
/// A shared pointer to a communicator, which a world and several meshes may share.
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace tessera::comm
TESSERA_API_END

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

/// Thrown by a collective if another rank died, aborted or did not call in time. On CUDA the
/// collective's kernel can still run and use the tensors. Before tensors are freed, abort the group
/// and synchronize the device, or end the process.
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
  /// Returns a function for the watchdog thread: whether the device has finished the collective.
  /// Returns an empty function if the device has already finished. Call only after wait(). The
  /// function should hold no tensors.
  virtual std::function<bool()> device_progress() { return nullptr; }
};
/// A shared pointer to a running collective.
using WorkPtr = std::shared_ptr<Work>;

/// The collectives of one process group, on one rank. All ranks of the group make the same calls in
/// the same order. Tensors are contiguous and on the group's device. Calls are asynchronous: keep
/// the tensors unchanged until Work::wait(). Sizes are numbers of elements. Throws PeerError if
/// another rank dies, aborts or does not call in time. Throws Error for invalid arguments. Not
/// recorded by autograd. Not thread safe.
///
/// To write a back end, derive from this class, and call DeviceMesh::from_groups(). A collective
/// that is not overridden throws Error. This example simulates all ranks in one rank:
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
  /// Runs several all-gathers as one collective: inputs[i] [n_i] of ranks 0, 1, ... -> outputs[i]
  /// [size * n_i]. All tensors have one dtype.
  virtual WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs);
  /// Runs several reduce-scatters as one collective: inputs[i] [size * n_i] -> outputs[i] [n_i].
  /// All tensors have one dtype.
  virtual WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs, ReduceOp op);
  /// Whether all_gather_group() and reduce_scatter_group() read and write the given tensors
  /// directly, without packing the tensors into a buffer.
  virtual bool moves_groups_in_place() const { return false; }
  /// Whether a reduction with ReduceOp::kAvg costs no more than with kSum. If true, kAvg must give
  /// the same bits as kSum and a division, for a power of two of ranks (except for subnormals and
  /// overflow).
  virtual bool averages_while_reducing() const { return false; }
  /// Returns an uninitialised flat tensor of `numel` elements for this group's collectives. NCCL
  /// registers the tensor's memory if the device supports registration.
  virtual at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options);
  /// Blocks the caller until all ranks have called barrier().
  virtual void barrier();
  /// Sets flags[i] to 1 on every rank if flags[i] is 1 on any rank. A flag is 0 or 1. All ranks
  /// pass equally many flags. The CPUs communicate: the call waits for no GPU work.
  virtual void any_rank(std::span<std::uint8_t> flags);
  /// Sets the purpose of the next collectives, such as "unit 'layers.3'", for messages. Not
  /// collective, but all ranks must pass the same string. Ranks compare the strings in
  /// agree_on_calls(). With the shared-memory back end or TESSERA_DEBUG=1, ranks compare the
  /// strings in collectives.
  virtual void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }
  const std::string& purpose() const { return purpose_; }
  /// Whether each call first compares the ranks' collectives and their purposes (set_purpose()),
  /// and throws Error if the ranks differ.
  virtual bool compares_calls() const { return false; }
  /// Compares, between ranks, the collectives with a purpose (set_purpose()) since the last
  /// comparison. Throws Error, on every rank, if the calls differ. `local_error`: an error message
  /// of this rank, shown to all ranks, or "". Collective between CPUs: waits for no GPU work. Does
  /// nothing if compares_calls() is true.
  virtual void agree_on_calls([[maybe_unused]] const std::string& local_error = {}) {}
  /// Makes ranks that wait in a collective of this group fail soon instead of at the time-out.
  virtual void abort() {}
  /// The back end's name in messages: "gloo", "shm", "nccl" or "loopback".
  virtual std::string name() const = 0;
  /// Whether wait() does not block and the device runs collectives in the order of the calls
  /// (NCCL). Otherwise all ranks must call wait() in the same order.
  virtual bool keeps_order_on_device() const { return false; }
  /// Closes the group; call no method afterwards. An NCCL group closes on all ranks together. If a
  /// rank does not call shutdown() within `patience`, the NCCL group is aborted. Throws PeerError
  /// in this case.
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

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/placement.h"

namespace at {
class Tensor;
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
  /// Returns when all ranks have called it.
  virtual void barrier();
  /// Makes peers that wait in a collective of this group fail soon instead of at the time-out.
  virtual void abort() {}
  /// "gloo", "shm", "nccl", "loopback".
  virtual std::string name() const = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_;
  int size_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace tessera::comm

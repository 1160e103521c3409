// Communication that is delayed: callbacks at the end of a backward, pending transfers, and sums of
// gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

namespace comm {
class Communicator;
}

/// Finishes this rank's asynchronous redistributions (RedistributeOptions::async), including
/// redistributions in a backward, and returns `group`. Call this function before a synchronous
/// collective: ranks that use asynchronous results in different orders would otherwise deadlock.
/// The call is needed only on a CPU; on a GPU the streams preserve the order. Does not throw: a
/// failed redistribution throws when its result is used. Not collective. Example:
/// flush_pending_transfers(group).all_reduce(sums, ReduceOp::kSum)->wait();
comm::Communicator& flush_pending_transfers(comm::Communicator& group);

/// Lets the gradient of `leaf` keep the layout that backward computes, such as Partial. The
/// gradient is then not redistributed to the layout of the leaf, so that the caller can reduce many
/// gradients together. Returns false, without effect, if an operator has already used the leaf, or
/// for a second call. Not collective. Throws Error for a plain tensor.
bool leave_gradient_pending(const at::Tensor& leaf);

}  // namespace tessera

namespace tessera::detail {

/// Calls `callback` at the end of the current backward. The callback can run on any autograd
/// thread, but uses the state (counters, random numbers, pending transfers) of the rank that called
/// this function. Must be called inside a backward or inside another such callback. Callbacks run
/// in the order of registration.
void call_at_end_of_backward(std::function<void()> callback);

/// Returns the process group over which `gradient` must be all-reduced (sum) to get the layout of
/// `leaf`, for a leaf that was passed to leave_gradient_pending(). Returns nullptr if the layouts
/// are equal, or if a sum over one group is not sufficient. Both tensors are distributed. Not
/// collective.
comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf);

/// A DeferredSums object sums many small tensors over the ranks of process groups, such as the
/// gradients of norm weights under sequence parallelism. All sums of one dtype over one process
/// group use one all-reduce. Not thread safe. Not recorded by autograd.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// Adds a tensor to be summed over `group`; `value` is this rank's term. run() calls `then` with
  /// the sum, which has the sizes of `value`. `owner`: identifies the tensor in forget(). Not
  /// collective.
  void add(comm::Communicator& group, at::Tensor value, Then then, const void* owner = nullptr);
  /// Computes the sums of all tensors that were added. Collective over their process groups.
  void run();
  /// Drops the tensors that were added with `owner`, if run() has not summed them. All ranks of the
  /// process group must call forget().
  void forget(const void* owner);

 private:
  struct Term {
    at::Tensor value;
    Then then;
    const void* owner;
  };
  struct Bucket {
    comm::Communicator* group;
    c10::ScalarType dtype;
    std::vector<Term> terms;
  };
  static void run(const Bucket& bucket);

  std::vector<Bucket> buckets_;
};

}  // namespace tessera::detail
TESSERA_API_END

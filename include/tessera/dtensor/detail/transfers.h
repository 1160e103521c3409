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

/// Finishes this rank's asynchronous redistributions and returns `group`. Call before a synchronous
/// collective on a CPU: ranks that use asynchronous results in different orders would deadlock. Not
/// collective. Does not throw; a failed redistribution throws when its result is used.
/// flush_pending_transfers(group).all_reduce(sums, ReduceOp::kSum)->wait();
comm::Communicator& flush_pending_transfers(comm::Communicator& group);

/// Lets the gradient of `leaf` keep the layout from backward, such as Partial, so that the caller
/// can reduce many gradients together. Returns false, without effect, for a second call or a leaf
/// that is already used. Not collective. Throws Error for a plain tensor.
bool leave_gradient_pending(const at::Tensor& leaf);

}  // namespace tessera

namespace tessera::detail {

/// Calls `callback` at the end of the current backward, in the order of registration. The callback
/// runs on any autograd thread, with the state of this rank. Call only in a backward or in another
/// such callback.
void call_at_end_of_backward(std::function<void()> callback);

/// Returns the process group for the all-reduce (sum) of `gradient` to the layout of `leaf`, after
/// leave_gradient_pending(leaf). Returns nullptr if the layouts are equal, or one sum is not
/// sufficient. Not collective.
comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf);

/// A DeferredSums object sums many small tensors over process groups, such as gradients of norm
/// weights. Uses one all-reduce for each dtype and process group. Not thread safe. Not recorded by
/// autograd.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// Adds this rank's term `value` of a sum over `group`. run() calls `then` with the sum, of the
  /// sizes of `value`. `owner`: the key for forget(). Not collective.
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

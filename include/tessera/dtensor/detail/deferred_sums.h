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

namespace detail {

/// If `gradient` lacks only a sum over some ranks to have the layout of `leaf`: the process group
/// of this sum; else nullptr. Such gradients belong to leaves for which leave_gradient_pending()
/// was called. Both tensors are distributed. Not collective.
comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf);

/// Sums of many small tensors over the ranks of a process group, such as the gradients of norm
/// weights under sequence parallelism. They are combined into one all-reduce per group and type,
/// instead of one tiny all-reduce each. One thread at a time. Without autograd.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// Adds a sum. `value`: this rank's term. run() calls `then` with the sum, which has the same
  /// sizes. `owner`: see forget(). Not collective.
  void add(comm::Communicator& group, at::Tensor value, Then then, const void* owner = nullptr);
  /// Computes all sums that were added. Collective over each group in use.
  void run();
  /// Drops the sums that were added for `owner`. All ranks of the group must do so.
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

}  // namespace detail
}  // namespace tessera
TESSERA_API_END

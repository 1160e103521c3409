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

/// The group over which `gradient` is still to be summed before it has the layout of `leaf`, if a
/// sum is all that is missing; else nullptr. Such a gradient comes from a leaf that
/// leave_gradient_pending() was called for. Both tensors are distributed. Not collective.
comm::Communicator* pending_sum_group(const at::Tensor& gradient, const at::Tensor& leaf);

/// Sums of many small tensors over the ranks of a group, such as the gradients of norm weights
/// under sequence parallelism. They are done together: one all-reduce per group and type instead of
/// a tiny one each. One thread at a time. No gradient.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// `value`: this rank's term. `then` gets the sum, of the same sizes, in run(). `owner`: see
  /// forget(). Not collective.
  void add(comm::Communicator& group, at::Tensor value, Then then, const void* owner = nullptr);
  /// Does all sums. Collective over each group that something was added for.
  void run();
  /// Drops what was added for `owner`. All ranks of the group must do so.
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

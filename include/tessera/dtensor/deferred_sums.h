#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

namespace comm {
class Communicator;
}

/// Sums that many small tensors await, such as the gradients of norm weights under sequence
/// parallelism: done together, one all-reduce per group and type, instead of a tiny one each.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// `value`: this rank's term. `then` receives the sum, of the same sizes. `owner`: see forget().
  void add(comm::Communicator& group, at::Tensor value, Then then, const void* owner = nullptr);
  /// Collective over each group that was added to.
  void run();
  /// Drops what was added for `owner`, on all ranks alike.
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

}  // namespace tessera

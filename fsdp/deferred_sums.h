#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::comm {
class Communicator;
}

namespace tessera::fsdp {

/// Sums over other groups (tensor parallelism's) that small gradients await, norm weights' under
/// sequence parallelism: done together at the end of backward, one all-reduce per group and type,
/// instead of a tiny one each.
class DeferredSums {
 public:
  using Then = std::function<void(const at::Tensor& sum)>;

  /// `value`: this rank's term. `then` receives the sum, of the same sizes.
  void add(comm::Communicator& group, at::Tensor value, Then then);
  /// Collective over each group that was added to.
  void run();
  void clear() { buckets_.clear(); }

 private:
  struct Bucket {
    comm::Communicator* group;
    c10::ScalarType dtype;
    std::vector<at::Tensor> values;
    std::vector<Then> then;
  };
  static void run(const Bucket& bucket);

  std::vector<Bucket> buckets_;
};

}  // namespace tessera::fsdp

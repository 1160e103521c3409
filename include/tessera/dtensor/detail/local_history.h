#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

/// A local tensor that a distributed one gave away (to_local).
struct GivenLocal {
  DeviceMesh mesh;                  ///< of the distributed tensor
  LayoutPtr layout;                 ///< of the distributed tensor
  LayoutPtr gradient;               ///< that local gradients are taken to have
  std::vector<std::int64_t> sizes;  ///< of the distributed tensor

  /// Equal on every rank, with equal gradients.
  bool replicated() const { return layout->is_replicated() && gradient->is_replicated(); }
};

/// What plain tensors were computed from, as autograd has recorded it: its graph is the mark that
/// plain operators hand on. Nodes are gone over once in the life of this object, so that the
/// tensors of one graph cost one look at each node. Not collective. One thread at a time.
class LocalHistory {
 public:
  struct Sources {
    std::vector<at::Tensor> leaves;  ///< plain ones
    std::vector<GivenLocal> given;   ///< where the graph of distributed tensors begins
    bool cut = false;                ///< by chunk, split, slices, select or unbind
    /// Of the operators and of the dimensions that they read: equal for what one code computes.
    std::uint64_t signature = 0;
  };

  /// The sources of `tensor` that no earlier call has come to. None of a tensor without gradient.
  Sources trace(const at::Tensor& tensor);
  /// Begins anew.
  void forget() { known_.clear(); }

 private:
  /// With its sequence number: a node may be freed, and another made in its place.
  using Key = std::pair<const torch::autograd::Node*, std::uint64_t>;
  struct HashOfKey {
    std::size_t operator()(const Key& key) const { return key.second; }
  };

  std::unordered_set<Key, HashOfKey> known_;
};

}  // namespace tessera::detail

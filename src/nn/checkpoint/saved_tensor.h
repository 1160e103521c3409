#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn::detail {

/// What is known of a tensor that a region's forward saved for backward.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  /// Throws Error if `again`, the `index`-th tensor that the recomputation saves, is another.
  void check(const at::Tensor& again, std::size_t index) const;

 private:
  std::string text() const;
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;

  std::vector<std::int64_t> sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  std::optional<ShardingSpec> sharding_;
};

/// A tensor that a recomputation saved again, until backward takes it.
class RecomputedTensor {
 public:
  explicit RecomputedTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor._version()) {}
  /// Throws Error if it was modified in place since it was saved.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

/// One entry for each tensor that forward saved; empty where nobody needs it (any more).
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

}  // namespace tessera::nn::detail

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A tensor of the files: a parameter, or the rows of a fused one that belong to one of its parts
/// (nn::StoredParts).
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<PartRows> rows{};  ///< those of the parameter; nullopt: all

  /// With an offset in this tensor, and the part of `block` that goes there.
  using Visit = std::function<void(std::span<const std::int64_t> offset, const at::Tensor& part)>;
  /// Calls `visit` for the overlap of a block of the parameter at `offset` with this tensor.
  void visit(std::span<const std::int64_t> offset, const at::Tensor& block,
             const Visit& visit) const;
};

/// The tensors that files store a parameter as: under its FQN, or by parts, whose modules are
/// beside the parameter's module ("layers.0.qkv.weight" as "layers.0.q.weight" and so on).
std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot);

}  // namespace tessera::checkpoint

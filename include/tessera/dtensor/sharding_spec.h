#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>

#include "tessera/core/detail/layout.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// How a tensor is distributed: the mesh and the layout of the tensor.
struct ShardingSpec {
  DeviceMesh mesh;
  LayoutPtr layout = nullptr;
  friend bool operator==(const ShardingSpec&, const ShardingSpec&) = default;
};

/// Options of a redistribution.
struct RedistributeOptions {
  /// Whether redistribute() returns before the last collective has finished. The first use of the
  /// result waits, and throws if the collective failed. On a CPU the next synchronous
  /// redistribution also waits. In backward the gradient is redistributed asynchronously.
  bool async = false;
  /// With `async`: the program does not write to the tensor, nor in backward to the gradient,
  /// before the first use of the redistributed tensor. Then the collective needs no copy of its
  /// input.
  bool source_unchanged = false;
};

/// Writes the mesh and the layout of a ShardingSpec: "DeviceMesh((dp=2, tp=2), cpu), [m0 | -]".
std::ostream& operator<<(std::ostream& stream, const ShardingSpec& spec);

namespace detail {

/// The type of `is_distributed`, which is a function object.
struct IsDistributed {
  bool operator()(const at::Tensor& tensor) const;
};

}  // namespace detail

/// is_distributed(tensor) returns whether `tensor` is distributed. `is_distributed` is an object
/// and not a function, so that argument-dependent lookup does not find at::is_distributed. The
/// unrelated at::is_distributed returns false for every tensor.
inline constexpr detail::IsDistributed is_distributed{};
/// Returns the mesh and layout of a distributed tensor. Throws Error for a plain tensor.
const ShardingSpec& sharding_spec(const at::Tensor& tensor);
/// Returns the local tensor of a distributed tensor, without autograd, or a plain tensor unchanged.
/// Not collective.
const at::Tensor& local_tensor(const at::Tensor& tensor);

}  // namespace tessera
TESSERA_API_END

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// How a tensor is distributed: on which mesh, and with which layout.
struct ShardingSpec {
  DeviceMesh mesh;
  LayoutPtr layout = nullptr;
  friend bool operator==(const ShardingSpec&, const ShardingSpec&) = default;
};

/// Options of a redistribution.
struct RedistributeOptions {
  /// The tensor is cast to this type first; the result has this type.
  std::optional<c10::ScalarType> forward_dtype{};
  /// The gradient is cast to this type, redistributed back, and cast to the type of the tensor.
  std::optional<c10::ScalarType> backward_dtype{};
  /// Returns before the last collective has finished. The first use of the values waits for it, and
  /// throws if it failed. On a CPU every later synchronous collective of a redistribution waits for
  /// it too. The gradient is redistributed asynchronously too.
  bool async = false;
};

/// Prints the mesh and the layout: "DeviceMesh((dp=2, tp=2), cpu), [m0 | -]".
std::ostream& operator<<(std::ostream& stream, const ShardingSpec& spec);

namespace detail {

/// The type of the function object is_distributed.
struct IsDistributed {
  bool operator()(const at::Tensor& tensor) const;
};

}  // namespace detail

/// is_distributed(tensor): whether a tensor is distributed. It is an object, so that
/// argument-dependent lookup does not find the unrelated function at::is_distributed. That function
/// and x.is_distributed() return false for every tensor.
inline constexpr detail::IsDistributed is_distributed{};
/// The spec of a distributed tensor. Throws Error for a plain tensor.
const ShardingSpec& sharding_spec(const at::Tensor& tensor);
/// The local tensor of a distributed tensor, without autograd; for a plain tensor, the tensor
/// itself. Not collective.
const at::Tensor& local_tensor(const at::Tensor& tensor);
/// A distributed tensor of global `sizes` with local tensor `local`, without autograd history.
/// Throws Error if `local` has other sizes than this rank's shard. Not collective.
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes);

}  // namespace tessera
TESSERA_API_END

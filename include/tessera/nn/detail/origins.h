#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

// The shards of a parameter must be parts of one tensor, or come from one seed. Their values do not
// show this. So ranks compare the origin of their shards: the tensor that was cut, or the seed.

/// The origin of the parameters of a module. Attached to the modules that own them.
struct Origins {
  struct Origin {
    std::int64_t number = 0;                           ///< identifies it; not 0
    tessera::detail::TensorIdentity tensor = nullptr;  ///< that was cut or filled
    std::uint64_t version = 0;                         ///< then: a later write makes other values
  };
  std::unordered_map<const ParameterSlot*, Origin> of;
};

std::int64_t origin_of_seed(std::uint64_t seed);
/// From a few elements along each dimension: other random numbers differ in any of them.
std::int64_t origin_of_values(at::Tensor whole);

/// Records the origin of the slot's persistent tensor.
void note_origin(const ParameterSlot& slot, std::int64_t number);
/// 0: this rank has no shard, or the values were written afterwards, for example by a load.
std::int64_t origin_of(const ParameterSlot& slot);

/// "the shards of ... on rank 0 and rank 2 are parts of different tensors"; empty if there are
/// none. All ranks of the mesh pass the same parameters: names for messages, and origins.
/// Collective, between the hosts. Throws Error, on all ranks, if ranks pass different numbers of
/// parameters.
std::string different_origins(const DeviceMesh& mesh,
                              const std::vector<std::pair<std::string, std::int64_t>>& origins);

/// Grows with each write to `tensor` or its local tensor that autograd sees. 0 for a tensor that
/// was made in inference mode.
std::uint64_t written_version(const at::Tensor& tensor);

}  // namespace tessera::nn::detail
TESSERA_API_END

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

// Parts of one parameter must be parts of one tensor: of one that all ranks had, or of one seed.
// Their values do not show that: parts of other tensors fit together as well. So ranks compare what
// the parts were cut from, or filled by.

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
/// A few positions along each dimension: of other random numbers, any would tell.
std::int64_t origin_of_values(at::Tensor whole);

/// Notes where the values of the slot's persistent tensor come from.
void note_origin(const ParameterSlot& slot, std::int64_t number);
/// 0: this rank has no part, or its values were written since, as by a load.
std::int64_t origin_of(const ParameterSlot& slot);

/// "the shards of ... on rank 0 and rank 2 are parts of different tensors"; empty: of none. The
/// ranks of the mesh give the same parameters, each as it is named in messages, with its origin.
/// Collective, between the hosts. Throws Error, on all ranks, if some give more than others.
std::string different_origins(const DeviceMesh& mesh,
                              const std::vector<std::pair<std::string, std::int64_t>>& origins);

/// Grows with each write to `tensor`, or to its local part, that autograd sees. 0 for a tensor made
/// in inference mode, which counts nothing.
std::uint64_t written_version(const at::Tensor& tensor);

}  // namespace tessera::nn::detail
TESSERA_API_END

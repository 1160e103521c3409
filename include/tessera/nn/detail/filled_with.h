#pragma once

#include <cstdint>
#include <unordered_map>

#include "tessera/export.h"
#include "tessera/internals/detail/tensor_identity.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// From which seed nn::init_weights has filled a module's parameters, for whoever compares ranks.
/// Attached to the modules that own them.
struct FilledWith {
  struct Fill {
    std::uint64_t seed = 0;
    tessera::detail::TensorIdentity tensor = nullptr;  ///< that was filled
    std::uint64_t version = 0;                         ///< then: a later write makes other values
  };
  std::unordered_map<const ParameterSlot*, Fill> fills;
};

/// Grows with each write to `tensor`, or to its local part, that autograd sees. 0 for a tensor made
/// in inference mode, which counts nothing.
std::uint64_t written_version(const at::Tensor& tensor);

}  // namespace tessera::nn::detail
TESSERA_API_END

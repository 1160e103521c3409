#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "tessera/core/placement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::testing {

/// Values that every rank makes alike.
inline at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator);
}

inline nn::SlotPtr slot_of(const at::Tensor& tensor) {
  return std::make_shared<nn::ParameterSlot>(tensor.clone().requires_grad_(), true);
}

inline nn::SlotPtr slot_of(const at::Tensor& tensor, const DeviceMesh& mesh,
                           const Placements& placements) {
  const at::Tensor spread = distribute_tensor(tensor.clone(), mesh, placements).tensor().detach();
  return std::make_shared<nn::ParameterSlot>(spread.requires_grad_(), true);
}

/// Gives the slot's tensor a gradient, spread as it or as said.
inline void set_grad(const nn::SlotPtr& slot, const at::Tensor& grad) {
  const at::Tensor& tensor = slot->persistent();
  tensor.mutable_grad() = tessera::is_distributed(tensor)
                              ? distribute_tensor(grad.clone(), sharding_spec(tensor).mesh,
                                                  DistributedTensor(tensor).placements())
                                    .tensor()
                                    .detach()
                              : grad.clone();
}

inline at::Tensor whole(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor.detach()).full_tensor()
                                         : tensor.detach();
}

}  // namespace tessera::testing

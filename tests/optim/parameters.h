#pragma once

#include "tessera/nn/parameter.h"
#include "tessera/optim/optimizer.h"
#include "testing/distributed.h"

namespace tessera::testing {

/// 2, 3 or 4 ranks get uneven or empty shards of parameters with these sizes.
inline const std::vector<std::vector<std::int64_t>> kSizes{{7, 5}, {3}, {1, 4}, {8, 2}};

/// Returns a tensor of shape kSizes[i]; with `is_complex`, of shape (*kSizes[i], 2).
inline at::Tensor values_of(std::size_t i, std::uint64_t seed, bool is_complex = false) {
  std::vector<std::int64_t> sizes = kSizes[i];
  if (is_complex) {
    sizes.push_back(2);
  }
  return normal_values(sizes, seed + i);
}

inline nn::SlotPtr slot_of(const at::Tensor& tensor) {
  return std::make_shared<nn::ParameterSlot>(tensor.clone().requires_grad_(), true);
}

inline nn::SlotPtr slot_of(const at::Tensor& tensor, const DeviceMesh& mesh,
                           const Placements& placements) {
  const at::Tensor spread = distribute_tensor(tensor.clone(), mesh, placements).tensor().detach();
  return std::make_shared<nn::ParameterSlot>(spread.requires_grad_(), true);
}

/// Sets the gradient of the slot's tensor to `grad`, distributed like the tensor.
inline void set_grad(const nn::SlotPtr& slot, const at::Tensor& grad) {
  const at::Tensor& tensor = slot->persistent();
  tensor.mutable_grad() = tessera::is_distributed(tensor)
                              ? distribute_tensor(grad.clone(), sharding_spec(tensor).mesh,
                                                  DistributedTensor(tensor).placements())
                                    .tensor()
                                    .detach()
                              : grad.clone();
}

inline std::vector<at::Tensor> tensors_of(const std::vector<nn::SlotPtr>& slots) {
  std::vector<at::Tensor> tensors;
  for (const nn::SlotPtr& slot : slots) {
    tensors.push_back(slot->persistent());
  }
  return tensors;
}

inline std::vector<at::Tensor> tensors_of(optim::Optimizer& optimizer) {
  std::vector<at::Tensor> tensors = tensors_of(optimizer.parameters());
  for (const optim::StateTensor& state : optimizer.state()) {
    tensors.push_back(state.tensor);
  }
  for (at::Tensor& tensor : tensors) {
    tensor = tensor.detach().clone();
  }
  return tensors;
}

}  // namespace tessera::testing

namespace tessera::optim {

using testing::kSizes;
using testing::set_grad;
using testing::slot_of;
using testing::tensors_of;
using testing::values_of;

}  // namespace tessera::optim

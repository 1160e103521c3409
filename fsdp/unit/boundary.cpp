// Moves the tensors that enter a unit's forward to the unit's device, and casts those that enter
// and leave it by its mixed-precision policy. unit.cpp says when; buffers are moved once, when the
// unit is made.

#include "unit/boundary.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

#include "tessera/dtensor/distributed_tensor.h"
#include "unit/attached_units.h"

namespace tessera::fsdp {
namespace {

/// Distributed tensors are on their mesh's device, and meta tensors have no data to move.
bool is_elsewhere(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.device() != device && !tensor.is_meta() &&
         !tessera::is_distributed(tensor);
}

bool is_floating(const at::Tensor* tensor) {
  return tensor->defined() && tensor->is_floating_point();
}

void move_buffers_of(torch::nn::Module& module, c10::Device device,
                     const std::unordered_set<nn::SlotPtr>& ignored) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    for (const auto& [name, slot] : ours->buffer_slots()) {
      if (!ignored.contains(slot) && is_elsewhere(slot->get(), device)) {
        // Through the slot, so that nn::Parameter members see it.
        slot->swap(slot->get().to(device));
      }
    }
  }
  for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    if (is_elsewhere(buffer, device)) {
      // In place: libtorch's register_buffer handed out the tensor itself.
      buffer.set_data(buffer.to(device));
    }
  }
}

}  // namespace

void move_inputs(nn::TensorList inputs, c10::Device device) {
  for (at::Tensor* input : inputs) {
    if (is_elsewhere(*input, device)) {
      *input = input->to(device);
    }
  }
}

void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored) {
  // A buffer that is moved must not become a result of autograd.
  const c10::AutoGradMode no_grad(false);
  const auto move = [&](const std::string&, torch::nn::Module& module) {
    move_buffers_of(module, device, ignored);
  };
  for (nn::ModuleBase* module : modules) {
    nn::visit_modules(*module, move, outside_of_units());
  }
}

std::optional<c10::ScalarType> floating_type(nn::TensorList tensors) {
  const auto first = std::ranges::find_if(tensors, is_floating);
  if (first == tensors.end()) {
    return std::nullopt;
  }
  return (*first)->scalar_type();
}

void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype) {
  if (!dtype) {
    return;
  }
  for (at::Tensor* tensor : tensors) {
    if (is_floating(tensor)) {
      *tensor = tensor->to(*dtype);
    }
  }
}

}  // namespace tessera::fsdp

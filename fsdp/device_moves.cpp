#include "device_moves.h"

#include <c10/core/GradMode.h>

#include "tessera/dtensor/distributed_tensor.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

bool is_elsewhere(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.device() != device && !tensor.is_meta() &&
         !tessera::is_distributed(tensor);
}

void move_buffers_below(torch::nn::Module& module, c10::Device device,
                        const std::unordered_set<nn::SlotPtr>& ignored) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    if (ours->attached<Unit>() != nullptr) {
      return;
    }
    for (const auto& [name, slot] : ours->buffer_slots()) {
      if (!ignored.contains(slot) && is_elsewhere(slot->get(), device)) {
        slot->set(slot->get().to(device));
      }
    }
  }
  for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    if (is_elsewhere(buffer, device)) {
      buffer.set_data(buffer.to(device));
    }
  }
  for (const auto& child : module.children()) {
    move_buffers_below(*child, device, ignored);
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
  const c10::AutoGradMode no_grad(false);
  for (nn::ModuleBase* module : modules) {
    move_buffers_below(*module, device, ignored);
  }
}

}  // namespace tessera::fsdp

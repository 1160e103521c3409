#include "module/buffer_types.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Buffers in slots and libtorch's own.
NamedTensors buffers_of(const ModuleBase& root) {
  NamedTensors buffers;
  for (const auto& [fqn, slot] : root.named_buffer_slots()) {
    buffers.emplace_back(fqn, slot->get());
  }
  for (const auto& item : root.named_buffers()) {
    buffers.emplace_back(item.key(), item.value());
  }
  return buffers;
}

/// Whether the module that has `buffer` is `module`, or around it.
bool is_around(const std::string& buffer, const std::string& module) {
  const std::size_t dot = buffer.rfind('.');
  return dot == std::string::npos || (module + ".").starts_with(buffer.substr(0, dot + 1));
}

}  // namespace

std::string hint_for(const c10::Error& error, const ModuleBase& root, const std::string& fqn) {
  // Parameters and buffers have storage: the outermost call has checked that.
  if (std::string text = error.msg(); text.find("meta") != std::string::npos) {
    return "; a tensor on the meta device was kept from the constructor, before nn::to_empty made "
           "the parameters anew: keep the nn::Parameter or the slot, and read it in forward";
  }
  if (error.msg().find("type") == std::string::npos) {
    return "";
  }
  const NamedSlots slots = root.named_slots();
  for (const auto& [name, buffer] : buffers_of(root)) {
    if (!buffer.defined() || !buffer.is_floating_point() || !is_around(name, fqn)) {
      continue;
    }
    const auto other = std::ranges::find_if(slots, [type = buffer.scalar_type()](auto& slot) {
      const at::Tensor& parameter = slot.second->get();
      return parameter.is_floating_point() && parameter.scalar_type() != type;
    });
    if (other != slots.end()) {
      return tessera::detail::concat(
          "; buffer '", name, "' is of type ", buffer.scalar_type(), ", and parameters are ",
          other->second->get().scalar_type(),
          ", as a policy of mixed precision may have it: cast it where it is used, "
          "buffer.to(x.scalar_type()), or make its module (a held one of libtorch's, say) an FSDP "
          "unit of its own, whose mp_policy has param_dtype = at::k",
          buffer.scalar_type(), " and restore_input_dtype = true");
    }
  }
  return "";
}

}  // namespace tessera::nn

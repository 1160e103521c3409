// Whether the storage of a module was filled. Slots know; storage that was not is an error and not
// noise.

#include <string>
#include <vector>

#include "module/check_filled.h"
#include "module/meta_buffers.h"
#include "tessera/core/error.h"
#include "tessera/nn/module.h"

namespace tessera::nn {
namespace {

struct Unfilled {
  std::vector<std::string> names;
  bool on_meta = false;

  void add(const NamedSlots& slots) {
    for (const auto& [name, slot] : slots) {
      if (!slot->initialized()) {
        names.push_back(name);
        on_meta = on_meta || slot->persistent().is_meta();
      }
    }
  }
  /// Three names show which part of the model was forgotten.
  std::string first_names() const {
    std::string first;
    for (std::size_t i = 0; i < names.size() && i < 3; ++i) {
      first += (i == 0 ? "'" : ", '") + names[i] + "'";
    }
    return names.size() > 3 ? first + ", ..." : first;
  }
};

}  // namespace

void refuse_meta_buffers(const ModuleBase& module, const std::string& asked) {
  for (const auto& buffer : module.named_buffers()) {
    TESSERA_CHECK(!buffer.value().is_meta(), asked, ": buffer '", buffer.key(),
                  "' is on the meta device and cannot be swapped; make it by register_buffer_slot");
  }
}

void check_filled(const ModuleBase& module, const std::string& asked, const std::string& remedy) {
  Unfilled unfilled;
  unfilled.add(module.named_slots());
  unfilled.add(module.named_buffer_slots());
  TESSERA_CHECK(!unfilled.on_meta, asked, ": of the parameters and buffers, ",
                unfilled.names.size(), " were never filled (", unfilled.first_names(),
                "), and some are on the meta device, without storage; call nn::to_empty, then "
                "nn::init_weights, or load a checkpoint");
  TESSERA_CHECK(unfilled.names.empty(), asked, ": the storage of ", unfilled.names.size(),
                " parameters or buffers was never filled (", unfilled.first_names(), "); ", remedy);
  refuse_meta_buffers(module, asked);
}

void check_initialized(const ModuleBase& module, const std::string& asked) {
  check_filled(module, asked,
               "call nn::init_weights, load a checkpoint, or fill them in reset_parameters");
}

}  // namespace tessera::nn

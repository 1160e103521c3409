#pragma once

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

/// Writes the adapters of a model (nn::apply_lora) in PEFT's form, for
/// `PeftModel.from_pretrained(model, folder)`: adapter_model.safetensors, whose tensors are
/// base_model.model.FQN.lora_A.weight, and adapter_config.json. `base_model`: the folder or the
/// name of the model that the adapters were trained beside, as that file gives it.
///
/// Collective over `world`; rank 0 writes, as save_hugging_face() does: files appear whole. Throws
/// Error on all ranks, before anything is sent, for a model without adapters or with adapters of
/// different ranks, scales or dropouts, for parameters without values, and for a folder that cannot
/// be written or that holds another adapter_config.json, or a model. The adapter of an
/// nn::FusedLinear is written as one for each of its parts.
void save_lora(const nn::ModuleBase& module, comm::World& world,
               const std::filesystem::path& folder, const std::string& base_model);

/// Throws what save_lora() would, for a folder or adapters that it cannot save to or from. Makes
/// nothing. To be called on rank 0; not collective.
void check_save_lora(const nn::ModuleBase& module, const std::filesystem::path& folder,
                     const std::string& base_model);

}  // namespace tessera::checkpoint
TESSERA_API_END

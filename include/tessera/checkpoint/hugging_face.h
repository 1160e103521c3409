#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
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

/// Fills every parameter of `module` (plain, distributed or FSDP-sharded) by FQN from the
/// safetensors files of a Hugging Face folder. Each rank reads only the bytes of its shards.
/// Floating-point dtypes are converted. Buffers that the files lack are unchanged.
///
/// `model_name`: returns the name in the model for a tensor name in the files, or "" to skip the
/// tensor.
///
/// Collective over `world`. Throws Error on all ranks, before anything is changed:
/// - if names, sizes or dtypes do not fit;
/// - if a file is damaged;
/// - if a parameter is on the meta device or gathered by FSDP.
/// If reading fails later, all parameters count as uninitialized.
void load_hugging_face(nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder,
                       const std::function<std::string(const std::string&)>& model_name = {});
/// Fills the parameters of `module` from a folder, for programs with a single rank. Otherwise the
/// same as load_hugging_face() with `world`. Not collective.
void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder,
                       const std::function<std::string(const std::string&)>& model_name = {});

/// Writes a model folder that `transformers` can load: the unsharded weights, and `config_json` as
/// config.json. Weights of more than `max_shard_bytes` bytes are divided into several files.
/// `dtype`: the dtype of floating-point values (fp32, bf16, fp16 or fp64); by default fp32, and
/// fp64 for fp64 values. A model in the folder with the same config.json is replaced atomically.
///
/// Collective over `world`. Rank 0 writes. Throws Error, on all ranks and before anything is sent:
/// - if a parameter is uninitialized or differs between ranks (set_distinct_along);
/// - if "tie_word_embeddings" of `config_json` disagrees with the model;
/// - if the folder cannot be written, or contains an adapter or another model.
void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::optional<c10::ScalarType> dtype = {},
                       std::int64_t max_shard_bytes = std::int64_t{5} << 30);

/// Checks, before a long training, whether save_hugging_face() could save to `folder`, and throws
/// the errors of save_hugging_face(). Writes nothing. To be called on rank 0; not collective.
void check_save_hugging_face(const nn::ModuleBase& module, const std::filesystem::path& folder,
                             const std::string& config_json,
                             std::optional<c10::ScalarType> dtype = {});

/// Returns the tokenizer files, chat templates and generation_config.json of a model folder, by
/// file name. Throws Error for a broken symbolic link.
std::map<std::string, std::filesystem::path> other_files(const std::filesystem::path& model);
/// Copies the results of other_files() into `folder`. Each file appears completely or not at all.
/// Call on one rank before the weights are exported. Throws Error, before anything is written, if
/// `folder` has other files of this kind than `files`, or has other contents.
void copy_other_files(const std::map<std::string, std::filesystem::path>& files,
                      const std::filesystem::path& folder);
/// Checks, before a long training, whether copy_other_files() could copy the files, and throws the
/// errors of copy_other_files(). Writes nothing. Not collective.
void check_other_files(const std::map<std::string, std::filesystem::path>& files,
                       const std::filesystem::path& folder);

/// Compares two JSON model configurations. Returns the first difference that can change the
/// computation, as `"key" is 1 instead of 2`, or "". A missing key counts as null.
std::string config_change(const std::string& before, const std::string& now);

/// Writes the adapters of a model (nn::apply_lora) for PEFT: adapter_model.safetensors and
/// adapter_config.json. `base_model`: the folder or name of the base model, for
/// adapter_config.json. A fused or grouped layer is written as one adapter per part or expert.
///
/// Collective over `world`. Rank 0 writes. Throws Error, on all ranks and before anything is sent:
/// - if the model has no adapters, or adapters with different ranks, scales or dropouts;
/// - if a parameter is uninitialized;
/// - if the folder cannot be written, or contains a model or another adapter.
void save_lora(const nn::ModuleBase& module, comm::World& world,
               const std::filesystem::path& folder, const std::string& base_model);

/// Checks whether save_lora() could save the adapters of `module` to `folder`, and throws the
/// errors of save_lora(). Writes nothing. To be called on rank 0; not collective.
void check_save_lora(const nn::ModuleBase& module, const std::filesystem::path& folder,
                     const std::string& base_model);

}  // namespace tessera::checkpoint
TESSERA_API_END

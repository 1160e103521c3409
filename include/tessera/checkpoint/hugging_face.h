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

/// Fills every parameter of `module` (plain, distributed or FSDP-sharded), by FQN, from a Hugging
/// Face folder: model.safetensors, or model.safetensors.index.json and the files in the index. Each
/// rank reads only the bytes of its shards; floating-point dtypes are converted. For a tied
/// parameter, the files need only one of its FQNs. A fused parameter (nn::FusedLinear) is read from
/// the tensors of its parts. Persistent buffers are filled if the files contain these buffers; all
/// other buffers keep their values (see nn::init_buffers).
///
/// `model_name`: a function for files that name tensors differently from the model. Given a
/// tensor's name in the files, the function returns the name in the model, or "" to skip the
/// tensor. Throws Error if two tensors get the same name.
///
/// Collective over `world`: a failure on one rank is an Error on all ranks. Throws Error, before
/// anything is changed:
/// - if names, sizes or dtypes do not fit, with a list of the missing, unexpected and different
///   tensors;
/// - for a damaged file, and for an index that refers to files outside the folder;
/// - for parameters on the meta device, and for parameters that FSDP has gathered.
/// If reading fails later, all parameters count as uninitialized, so that no forward runs with
/// partly loaded weights.
void load_hugging_face(nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder,
                       const std::function<std::string(const std::string&)>& model_name = {});
/// Fills the parameters of `module` from a folder, for programs with a single rank. Otherwise the
/// same as load_hugging_face() with `world`. Not collective.
void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder,
                       const std::function<std::string(const std::string&)>& model_name = {});

/// Writes a model folder that `transformers` can load: the weights (all parameters and persistent
/// buffers, unsharded) and `config_json` as config.json. The weights are written to
/// model.safetensors or, if larger than `max_shard_bytes` bytes, to several files
/// model-0000k-of-0000n.safetensors with an index. In config.json, "torch_dtype" or "dtype" is set
/// to the weights' dtype; if `config_json` has neither key, "torch_dtype" is added for dtypes other
/// than fp32. Floating-point values are written in `dtype` (fp32, bf16, fp16 or fp64). Without
/// `dtype`, fp64 values are written in fp64 and all others in fp32. A tied parameter is written
/// once, under its first FQN; a fused parameter is written as its parts.
///
/// Collective over `world`. Rank 0 writes. Rank 0 receives one tensor at a time, large tensors in
/// blocks; the other ranks receive none. The folder is created if missing. A model in the folder is
/// replaced if its config.json describes the same model. At any instant, also if this process is
/// killed, the folder has either the older or the new model. A failure on one rank is an Error on
/// all ranks. Throws Error, before anything is sent:
/// - for parameters that are uninitialized or differ between ranks (set_distinct_along);
/// - if "tie_word_embeddings" of `config_json` disagrees with the model's embedding and head;
/// - for a folder that cannot be written, or that has too little free space;
/// - for a folder that contains an adapter or a model with a different config.json.
void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::optional<c10::ScalarType> dtype = {},
                       std::int64_t max_shard_bytes = std::int64_t{5} << 30);

/// Checks, before a long training, whether save_hugging_face() could save to `folder`, and throws
/// the errors of save_hugging_face(). Writes nothing. To be called on rank 0; not collective.
void check_save_hugging_face(const nn::ModuleBase& module, const std::filesystem::path& folder,
                             const std::string& config_json,
                             std::optional<c10::ScalarType> dtype = {});

/// Returns the files of a model folder other than the weights and config.json, by file name: the
/// tokenizer's files, chat templates, and generation_config.json. Throws Error for a broken
/// symbolic link.
std::map<std::string, std::filesystem::path> other_files(const std::filesystem::path& model);
/// Copies the results of other_files() into `folder`. Each file appears completely or not at all.
/// To be called on one rank before the weights are exported, so that an exported model always has
/// its tokenizer. Files with equal bytes are left unchanged. Throws Error, before anything is
/// written, if other_files(folder) has other files or other contents than `files`: the files and
/// the weights of an older model could not be replaced in one atomic step.
void copy_other_files(const std::map<std::string, std::filesystem::path>& files,
                      const std::filesystem::path& folder);
/// Checks, before a long training, whether copy_other_files() could copy the files, and throws the
/// errors of copy_other_files(). Writes nothing. Not collective.
void check_other_files(const std::map<std::string, std::filesystem::path>& files,
                       const std::filesystem::path& folder);

/// Compares two model configurations, both JSON objects. Returns the first key whose value differs
/// and can change the computation, as `"key" is 1 instead of 2`, or "" if there is none. A missing
/// key counts as null. Ignores weight dtypes, library versions, and the ids of BOS and EOS tokens.
std::string config_change(const std::string& before, const std::string& now);

/// Writes the adapters of a model (nn::apply_lora) in PEFT's format, for
/// `PeftModel.from_pretrained(model, folder)`: adapter_model.safetensors, whose tensors are named
/// base_model.model.FQN.lora_A.weight, and adapter_config.json. `base_model`, the folder or name of
/// the base model, is written to adapter_config.json.
///
/// Collective over `world`; rank 0 writes. Like save_hugging_face(), save_lora() never leaves
/// partial files. The adapter of an nn::FusedLinear is written as one adapter per part, the adapter
/// of an nn::GroupedLinear as one adapter per expert. Throws Error on all ranks, before anything is
/// sent: for a model without adapters; for adapters with different ranks, scales or dropouts; for
/// uninitialized parameters; for a folder that cannot be written; and for a folder that contains a
/// model or another adapter_config.json.
void save_lora(const nn::ModuleBase& module, comm::World& world,
               const std::filesystem::path& folder, const std::string& base_model);

/// Checks whether save_lora() could save the adapters of `module` to `folder`, and throws the
/// errors of save_lora(). Writes nothing. To be called on rank 0; not collective.
void check_save_lora(const nn::ModuleBase& module, const std::filesystem::path& folder,
                     const std::string& base_model);

}  // namespace tessera::checkpoint
TESSERA_API_END

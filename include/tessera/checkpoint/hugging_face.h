#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/inspect.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

/// How load_hugging_face() reads.
struct HuggingFaceOptions {
  /// {pattern of names in the files, name in the model}, for files of other code; see
  /// nn::renamed_fqn for what wildcards become. An empty name in the model leaves the tensors out.
  /// What no pair matches has the model's name. Error for a tensor that two pairs match, two
  /// tensors that get one name, and a pair that matches none.
  std::vector<std::pair<std::string, std::string>> names{};
};

/// Fills every parameter of `module` (plain, distributed or FSDP-sharded), by FQN, from a Hugging
/// Face folder: model.safetensors, or model.safetensors.index.json and its shards. Each rank reads
/// only the bytes of its shards; floating-point types are converted. A tied parameter needs one of
/// its FQNs in the files; a fused one (nn::FusedLinear) is read from the tensors of its parts.
/// Persistent buffers are filled as well where the files have them; else they keep their values,
/// like all other buffers: see nn::init_buffers.
///
/// Collective over `world`: a failure on one rank is an Error on all. Throws Error, before anything
/// is changed, if names, sizes or types do not fit, with a list of the tensors that are missing,
/// unexpected or different; for a damaged file, an index that leads out of the folder, and
/// parameters on the meta device or gathered by FSDP. If reading fails later, all parameters count
/// as never filled, so that no forward runs with half of the weights.
void load_hugging_face(nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const HuggingFaceOptions& options = {});
/// The same on this rank alone, for a program of one rank. Not collective.
void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder,
                       const HuggingFaceOptions& options = {});

/// Writes a folder that `transformers` loads: all parameters and persistent buffers, unsharded, in
/// model.safetensors or, beyond `max_shard_bytes` bytes, in model-0000k-of-0000n.safetensors with
/// an index; and `config_json` as config.json. Its "torch_dtype" or "dtype" is set to the weights'
/// type. Without either, "torch_dtype" is added unless that is fp32. A "model_type" that is missing
/// is added for weights with a Llama's names: "llama". Floating-point values are
/// written in `dtype` (fp32, bf16, fp16 or fp64); without it in fp32, those of fp64 in fp64. A tied
/// parameter is written once, under its first FQN; a fused one as the tensors of its parts.
///
/// Collective over `world`. Rank 0 writes. It receives one tensor at a time, large ones in blocks;
/// no other rank receives any. The folder is made if missing. A model in it is replaced if its
/// config.json says the same: at any instant, also if this process is killed, the folder holds the
/// older model or the new one. A failure on one rank is an Error on all. Throws Error, before
/// anything is sent, for parameters that were never filled or that differ between ranks
/// (set_distinct_along), for a head that is the embedding where `config_json` says that they are
/// two, or the other way, a folder that cannot be written or has too little room, and one that
/// holds an adapter or a model with another config.json.
void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::optional<c10::ScalarType> dtype = {},
                       std::int64_t max_shard_bytes = std::int64_t{5} << 30);

/// Throws what save_hugging_face() would, for a folder or parameters that it cannot save to or
/// from, before a long training. Makes nothing. To be called on rank 0; not collective.
void check_save_hugging_face(const nn::ModuleBase& module, const std::filesystem::path& folder,
                             const std::string& config_json,
                             std::optional<c10::ScalarType> dtype = {});

/// The files of a model's folder other than the weights and config.json, by their names in the
/// folder: the tokenizer's files, chat templates, and generation_config.json.
using FilesBesideWeights = std::map<std::string, std::filesystem::path>;
/// Those that a folder has. Throws Error for a link to a file that is not there.
FilesBesideWeights files_beside_weights(const std::filesystem::path& model);
/// Copies them, each complete or not at all. To be called before the weights are exported, on one
/// rank: so a model is never there without them. Files with the same bytes stay as they are. Throws
/// Error, before anything is written, for a folder that has other or further files of this kind,
/// which could not be replaced together with its weights.
void copy_beside_weights(const FilesBesideWeights& files, const std::filesystem::path& folder);
/// Throws what that would throw, before a long training. Makes nothing. Not collective.
void check_beside_weights(const FilesBesideWeights& files, const std::filesystem::path& folder);

/// How the model of a configuration differs from that of another, both JSON objects: the first key
/// whose value computes something else, `"key" is 1 instead of 2`. Empty if none does: types of
/// weights, names of versions and the tokens that begin and end texts don't count, and a missing or
/// null key has the default of the classes of Llama, Mistral and Qwen.
std::string config_change(const std::string& before, const std::string& now);

}  // namespace tessera::checkpoint
TESSERA_API_END

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
/// name of the base model of the adapters, to be written to that file.
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

#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// Fills every parameter of `module` (plain, distributed, or FSDP-sharded; by FQN) from a Hugging
/// Face folder: model.safetensors, or model.safetensors.index.json and its shards. Each rank reads
/// only the bytes of its slices; types are converted. Not collective. Nothing is changed unless
/// all names and sizes fit: Error lists missing and unexpected tensors and differing sizes.
/// Parameters tied to one slot need one of their names in the files.
void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder);

/// Writes model.safetensors (or model-0000k-of-0000n.safetensors and an index beyond
/// `max_shard_bytes`) with all parameters whole and in fp32, gathered one tensor at a time, written
/// by rank 0 of `world`. Collective over `world`. `config_json` becomes config.json. The folder is
/// made if missing; files appear complete or not at all. A failure on one rank is an Error on all.
void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::int64_t max_shard_bytes = std::int64_t{5} << 30);

}  // namespace tessera::checkpoint

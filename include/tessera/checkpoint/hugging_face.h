#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

/// Fills every parameter of `module` (plain, distributed, or FSDP-sharded; by FQN) from a Hugging
/// Face folder: model.safetensors, or model.safetensors.index.json and its shards. Each rank reads
/// only the bytes of its slices; floating-point types are converted. Tied parameters need one of
/// their names in the files. Buffers are not in the files: see nn::init_buffers.
///
/// Not collective. Nothing is changed unless all names, sizes and types fit: Error lists missing
/// and unexpected tensors and those that differ. Throws Error for a damaged file, an index that
/// leads out of the folder, and parameters on the meta device or gathered by FSDP.
void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder);

/// Writes model.safetensors (or model-0000k-of-0000n.safetensors and an index beyond
/// `max_shard_bytes`) with all parameters whole, floating-point ones in fp32, and `config_json` as
/// config.json: what `transformers` loads. Tied parameters are written once, under their first
/// name.
///
/// Collective over `world`. Rank 0 writes; it receives one tensor at a time, large ones in blocks,
/// and no other rank receives any. The folder is made if missing; every file appears complete or
/// not at all, config.json last, and an older model in the folder is replaced. A failure on one
/// rank is an Error on all.
void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::int64_t max_shard_bytes = std::int64_t{5} << 30);

}  // namespace tessera::checkpoint

// Valid input files, which the fuzzer then mutates.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/format.h"
#include "checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::fuzz_input {

using nlohmann::json;

inline constexpr const char* kShards[] = {"model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors"};

inline void write_shards(const std::filesystem::path& folder) {
  for (const int i : {0, 1}) {
    const std::string name = i == 0 ? "a" : "b";
    checkpoint::SafetensorsWriter writer(folder / kShards[i], {{name, at::kFloat, {2}}});
    writer.write(name, at::ones({2}));
    writer.finish();
  }
}

inline std::string index_of_shards() {
  return json{{"metadata", {{"total_size", 16}}},
              {"weight_map", {{"a", kShards[0]}, {"b", kShards[1]}}}}
      .dump();
}

/// A file as PyTorch's writer saves a shard: two tensors, and `sharding_info` as metadata.
inline std::string shard_with(const std::string& sharding_info) {
  const json header = {
      {"__metadata__",
       {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", sharding_info}}},
      {"w", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}},
      {"step", {{"dtype", "F32"}, {"shape", json::array()}, {"data_offsets", {24, 28}}}}};
  const std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::uint64_t length = text.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + text + std::string(28, '\0');
}

inline std::string sharding_info() {
  return R"({"w":{"saved_offsets":[0,0]},"step":{"saved_offsets":[]}})";
}

inline std::string manifest() {
  checkpoint::Manifest manifest{.run_id = "run", .step = 100, .world_size = 2};
  manifest.mesh_sizes = {2, 1};
  manifest.mesh_names = {"dp", "tp"};
  manifest.files = {{"shard-00000-model-00001-of-00001.safetensors", 300, {1}},
                    {"shard-00001-model-00001-of-00001.safetensors", 1 << 21, {2, 3}}};
  manifest.tensors["w"] = {"F32", {5, 3}, {"tied"}, {{0, {0, 0}, {3, 3}}, {1, {3, 0}, {2, 3}}}};
  manifest.tensors["step"] = {"F32", {}, {}, {{0, {}, {}}}};
  manifest.entries = {{"samples", 640}, {"schedule", {{"step", 100}}}};
  const std::string text = to_text(manifest);
  return text.substr(0, text.rfind(",\"crc32c\""));
}

}  // namespace tessera::fuzz_input

#include "save/write_shards.h"

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "blocks/blocks.h"
#include "checksum/granules.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {
namespace {

/// Metadata for PyTorch's HuggingFaceStorageReader: where in its tensor each block begins.
std::string sharding_info(const ShardFile& file) {
  nlohmann::json info;
  for (const FileChunk& chunk : file.chunks) {
    info[chunk.tensor]["saved_offsets"] = chunk.offset;
  }
  return info.dump();
}

void write_chunk(SafetensorsWriter& writer, const FileChunk& chunk) {
  for (const RowBlock& block : chunk.blocks) {
    const at::IntArrayRef all = block.values.sizes();
    for_each_piece(all, kMostPieceBytes / block.values.element_size(), [&](auto from, auto sizes) {
      std::vector<std::int64_t> offset(from.begin(), from.end());
      if (!offset.empty()) {
        offset[0] += block.row;
      }
      writer.write(chunk.tensor, offset, block_at(block.values, from, sizes));
    });
  }
}

FileRecord write_shard(const std::filesystem::path& folder, const ShardFile& file) {
  std::vector<SafetensorsWriter::Item> items;
  std::map<std::string, const FileChunk*> by_name;
  for (const FileChunk& chunk : file.chunks) {
    items.push_back({chunk.tensor, chunk.dtype, chunk.sizes});
    by_name.emplace(chunk.tensor, &chunk);
  }
  GranuleSums sums;
  SafetensorsWriter writer(
      folder / file.name, items, {{"format", "pt"}, {"DCP_SHARDING_INFO", sharding_info(file)}},
      [&sums](std::uint64_t offset, std::span<const std::byte> bytes) { sums.add(offset, bytes); });
  for (const std::string& tensor : writer.names()) {
    write_chunk(writer, *by_name.at(tensor));
  }
  writer.finish();
  return {file.name, sums.bytes(), sums.sums()};
}

}  // namespace

std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files) {
  std::vector<FileRecord> records;
  for (const ShardFile& file : files) {
    records.push_back(write_shard(folder, file));
  }
  return records;
}

}  // namespace tessera::checkpoint

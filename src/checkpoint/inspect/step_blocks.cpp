#include "inspect/step_blocks.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "blocks/blocks.h"
#include "safetensors/format.h"
#include "step/files_of_step.h"
#include "step/shards_of_others.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::int64_t kMostBlockBytes = std::int64_t{8} << 20;
/// Who compares blocks makes wider numbers of small ones.
constexpr std::int64_t kMostBlockElements = std::int64_t{2} << 20;

using Chunks = std::vector<std::pair<const std::string*, const ManifestChunk*>>;

/// By file.
std::vector<Chunks> chunks_of_files(const Manifest& manifest,
                                    const std::function<bool(const std::string&)>& wanted) {
  std::vector<Chunks> files(manifest.files.size());
  for (const auto& [name, tensor] : manifest.tensors) {
    if (!wanted(name)) {
      continue;
    }
    for (const ManifestChunk& chunk : tensor.chunks) {
      files[chunk.file].emplace_back(&name, &chunk);
    }
  }
  return files;
}

template <class Visit>
void read_chunk(const SafetensorsFile& file, const std::string& name, c10::ScalarType type,
                const ManifestChunk& chunk, const Visit& visit) {
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(type));
  const std::int64_t most = std::min(kMostBlockElements, kMostBlockBytes / element_bytes);
  for_each_piece(chunk.sizes, most, [&](auto from, auto sizes) {
    visit(name, moved(chunk.offset, from), file.read(name, from, sizes));
  });
}

}  // namespace

Manifest manifest_in(const std::filesystem::path& folder) {
  return has_shards_of_others(folder) ? manifest_of_shards(folder) : read_manifest(folder);
}

std::uint64_t bytes_of_tensor(const ManifestTensor& tensor) {
  return tensor_bytes(tensor.sizes, *find_dtype(tensor.dtype));
}

c10::ScalarType scalar_type_of(const std::string& name, const ManifestTensor& tensor) {
  const c10::ScalarType type = find_dtype(tensor.dtype)->scalar_type;
  TESSERA_CHECK(type != c10::ScalarType::Undefined, "tensor '", name,
                "' of the checkpoint has the type ", tensor.dtype,
                ", which libtorch lacks: convert the checkpoint first");
  return type;
}

void read_blocks(const std::filesystem::path& folder, const Manifest& manifest,
                 const std::function<bool(const std::string&)>& wanted,
                 const std::function<void(const std::string&, std::span<const std::int64_t>,
                                          const at::Tensor&)>& visit) {
  const std::vector<Chunks> files = chunks_of_files(manifest, wanted);
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (files[i].empty()) {
      continue;
    }
    const SafetensorsFile file = open_file_of_step(folder, manifest.files[i]);
    for (const auto& [name, chunk] : files[i]) {
      const ManifestTensor& tensor = manifest.tensors.at(*name);
      check_entry(file, *name, tensor, *chunk);
      read_chunk(file, *name, scalar_type_of(*name, tensor), *chunk, visit);
    }
  }
}

}  // namespace tessera::checkpoint

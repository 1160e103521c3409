#include "load/stored_step.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "blocks/blocks.h"
#include "step/files_of_step.h"
#include "step/tiling.h"

namespace tessera::checkpoint {

StoredStep::StoredStep(std::filesystem::path folder, Manifest manifest)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {
  for (const auto& [name, tensor] : manifest_.tensors) {
    for (const std::string& tied : tensor.tied) {
      stored_names_.emplace(tied, name);
    }
  }
}

const std::string& StoredStep::stored_name(const std::string& name) const {
  const auto tied = stored_names_.find(name);
  return manifest_.tensors.contains(name) || tied == stored_names_.end() ? name : tied->second;
}

const ManifestTensor* StoredStep::find(const std::string& name) const {
  const auto found = manifest_.tensors.find(stored_name(name));
  return found == manifest_.tensors.end() ? nullptr : &found->second;
}

void StoredStep::want(const std::string& name, std::span<const std::int64_t> offset,
                      const at::Tensor& block) {
  const ManifestTensor& tensor = *find(name);
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  for (const ManifestChunk& chunk : tensor.chunks) {
    const auto common = common_block(offset, sizes, chunk.offset, chunk.sizes);
    if (!common) {
      continue;
    }
    std::vector<std::int64_t> within;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      within.push_back(common->global_offset[dim] - offset[dim]);
    }
    wanted_[chunk.file].push_back({stored_name(name), &tensor, &chunk, common->local_offset,
                                   local_block(block, Box{{}, within, common->sizes})});
  }
}

SafetensorsFile StoredStep::open(std::size_t file, const std::vector<Wanted>& wanted) const {
  SafetensorsFile opened = open_file_of_step(folder_, manifest_.files.at(file));
  for (const Wanted& each : wanted) {
    check_entry(opened, each.name, *each.tensor, *each.chunk);
  }
  return opened;
}

void StoredStep::check() const {
  for (const auto& [file, wanted] : wanted_) {
    open(file, wanted);
  }
}

void StoredStep::read(const ReadLimits& limits) {
  for (const auto& [index, wanted] : std::exchange(wanted_, {})) {
    const SafetensorsFile file = open(index, wanted);
    // In the file's order: a MiB that neighbours share is read once.
    std::vector<const Wanted*> order;
    std::ranges::transform(wanted, std::back_inserter(order),
                           [](const auto& each) { return &each; });
    std::ranges::stable_sort(order, {},
                             [&](const auto* each) { return file.entry(each->name).offset; });
    PieceReads reads(limits);
    for (const Wanted* each : order) {
      reads.add(file, each->name, each->from, each->target);
    }
    reads.run();
  }
}

}  // namespace tessera::checkpoint

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "format.h"
#include "save.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

/// The ranks that have one part of a tensor, and the coordinate of the part on the tensor's mesh.
struct Holders {
  /// The mesh coordinate of the part; empty for a plain tensor.
  std::vector<std::int64_t> coordinate;
  std::vector<int> ranks;  ///< world ranks that store the part, ascending
};

using Coordinate = std::vector<std::int64_t>;

/// The coordinate in the mesh `root` of each rank of `mesh`, in the order of the ranks of `mesh`.
std::vector<Coordinate> coordinates_on(const DeviceMesh& root, const DeviceMesh& mesh) {
  std::vector<Coordinate> coordinates;
  const std::vector<int>& ranks = root.ranks();
  for (const int rank : mesh.ranks()) {
    const auto found = std::ranges::find(ranks, rank);
    coordinates.push_back(root.shape().coordinate(found - ranks.begin()));
  }
  return coordinates;
}

/// The dimensions along which any two of `coordinates` differ.
std::vector<std::size_t> varying_dims(const std::vector<Coordinate>& coordinates) {
  std::vector<std::size_t> dims;
  for (std::size_t dim = 0; dim < coordinates.front().size(); ++dim) {
    const bool varies = std::ranges::any_of(coordinates, [&](const Coordinate& coordinate) {
      return coordinate[dim] != coordinates.front()[dim];
    });
    if (varies) {
      dims.push_back(dim);
    }
  }
  return dims;
}

/// For each position in `mesh`: the ranks at this position in `mesh` itself and in the other slices
/// of the root mesh along the same dimensions (sibling slices).
std::vector<std::vector<int>> ranks_by_position(const DeviceMesh& mesh) {
  const DeviceMesh root = mesh.root();
  const auto coordinates = coordinates_on(root, mesh);
  const auto dims = varying_dims(coordinates);
  std::int64_t slice_size = 1;
  for (const std::size_t dim : dims) {
    slice_size *= root.size(static_cast<int>(dim));
  }
  TESSERA_CHECK(slice_size == mesh.size(), "a tensor is on ", to_string(mesh),
                ", a part of a dimension of ", to_string(root),
                ", so that it can't be known which ranks have copies: distribute it over a mesh of "
                "whole dimensions before saving");
  const auto along = [&](const Coordinate& coordinate) {
    Coordinate kept;
    for (const std::size_t dim : dims) {
      kept.push_back(coordinate[dim]);
    }
    return kept;
  };
  std::map<Coordinate, std::size_t> position_of;
  for (std::size_t position = 0; position < coordinates.size(); ++position) {
    position_of.emplace(along(coordinates[position]), position);
  }
  std::vector<std::vector<int>> ranks(coordinates.size());
  for (std::int64_t index = 0; index < root.size(); ++index) {
    const auto position = position_of.at(along(root.shape().coordinate(index)));
    ranks[position].push_back(root.ranks()[static_cast<std::size_t>(index)]);
  }
  return ranks;
}

/// The ranks that have each part of a tensor. The result depends on the layout alone, so it is
/// equal on every rank of the world. Sibling slices of a sliced mesh have copies. Throws Error for
/// a mesh whose sibling slices have unknown ranks.
std::vector<Holders> holders_of(const at::Tensor& tensor) {
  // Plain tensors are saved from rank 0: plain buffers may differ between ranks, for example the
  // running statistics of a norm.
  if (!tessera::is_distributed(tensor)) {
    return {{{}, {0}}};
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  const auto positions = ranks_by_position(spec.mesh);
  // Ranks are grouped by their coordinate along the sharding dimensions. Ranks that differ only
  // along other dimensions have copies.
  std::map<Coordinate, Holders> holders;
  for (std::size_t position = 0; position < positions.size(); ++position) {
    Coordinate coordinate = spec.mesh.shape().coordinate(static_cast<std::int64_t>(position));
    for (int dim = 0; dim < spec.mesh.ndim(); ++dim) {
      if (spec.layout->sharded_dim(dim) < 0) {
        coordinate[static_cast<std::size_t>(dim)] = 0;
      }
    }
    Holders& same = holders[coordinate];
    same.coordinate = coordinate;
    same.ranks.insert(same.ranks.end(), positions[position].begin(), positions[position].end());
  }
  std::vector<Holders> list;
  for (auto& [coordinate, same] : holders) {
    std::ranges::sort(same.ranks);
    list.push_back(same);
  }
  return list;
}

using Sizes = std::vector<std::int64_t>;

/// The smallest chunk that is divided between ranks. For a smaller part, an additional entry in a
/// header and in the manifest costs more than dividing saves.
constexpr std::int64_t kLeastDividedBytes = std::int64_t{1} << 20;

constexpr int kWeightsFile = 1;
constexpr int kOptimizerFile = 2;

std::vector<Box> boxes_at(const at::Tensor& tensor, const Sizes& coordinate) {
  if (tessera::is_distributed(tensor)) {
    return owned_boxes(*sharding_spec(tensor).layout, tensor.sizes().vec(), coordinate);
  }
  std::vector<Box> boxes;
  if (tensor.numel() != 0) {
    Box& whole = boxes.emplace_back();
    whole.sizes = tensor.sizes().vec();
    whole.global_offset.assign(whole.sizes.size(), 0);
    whole.local_offset = whole.global_offset;
  }
  return boxes;
}

/// Whether the block `next` begins where the block `chunk` ends.
bool continues(const PlannedChunk& chunk, const PlannedChunk& next) {
  return !chunk.sizes.empty() && next.offset[0] == chunk.offset[0] + chunk.sizes[0] &&
         std::equal(chunk.offset.begin() + 1, chunk.offset.end(), next.offset.begin() + 1) &&
         std::equal(chunk.sizes.begin() + 1, chunk.sizes.end(), next.sizes.begin() + 1);
}

/// Appends a block that consists of one part, or merges the block into the last block if the block
/// begins where the last block ends.
void append(std::vector<PlannedChunk>& chunks, PlannedChunk next) {
  if (chunks.empty() || !continues(chunks.back(), next)) {
    chunks.push_back(std::move(next));
    return;
  }
  PlannedChunk& chunk = chunks.back();
  next.parts[0].row = chunk.sizes[0];
  chunk.sizes[0] += next.sizes[0];
  chunk.parts.push_back(std::move(next.parts[0]));
}

/// The chunks of an entry at one coordinate of the mesh of the entry's tensor.
std::vector<PlannedChunk> chunks_at(const StateEntry& entry, std::size_t index,
                                    const Sizes& coordinate) {
  std::vector<PlannedChunk> chunks;
  for (const Box& box : boxes_at(entry.tensor, coordinate)) {
    PlannedChunk chunk{.entry = index,
                       .offset = box.global_offset,
                       .sizes = box.sizes,
                       .parts = {{0, box.local_offset, box.sizes}}};
    if (!entry.stored.rows) {
      append(chunks, std::move(chunk));
      continue;
    }
    entry.stored.rows->visit(box.global_offset[0], box.sizes[0],
                             [&](std::int64_t row, std::int64_t from, std::int64_t rows) {
                               PlannedChunk run = chunk;
                               run.offset[0] = row;
                               run.sizes[0] = run.parts[0].sizes[0] = rows;
                               run.parts[0].local_offset[0] += from;
                               append(chunks, std::move(run));
                             });
  }
  return chunks;
}

std::int64_t bytes_of_chunk(const StateEntry& entry, const PlannedChunk& chunk) {
  return std::accumulate(chunk.sizes.begin(), chunk.sizes.end(), entry.tensor.element_size(),
                         std::multiplies<>());
}

/// The rows [begin, begin + count) of a chunk.
PlannedChunk rows_of_chunk(const PlannedChunk& chunk, std::int64_t begin, std::int64_t count) {
  PlannedChunk rows = chunk;
  rows.offset[0] += begin;
  rows.sizes[0] = count;
  rows.parts.clear();
  for (ChunkRows part : chunk.parts) {
    const std::int64_t first = std::max(begin, part.row);
    const std::int64_t last = std::min(begin + count, part.row + part.sizes[0]);
    if (first < last) {
      part.local_offset[0] += first - part.row;
      part.sizes[0] = last - first;
      part.row = first - begin;
      rows.parts.push_back(part);
    }
  }
  return rows;
}

/// Assigns chunks to the ranks that write them.
class Writers {
 public:
  Writers(const std::vector<StateEntry>& entries, int world_size)
      : entries_(entries), bytes_(static_cast<std::size_t>(world_size), 0) {}

  void add(PlannedChunk chunk, const std::vector<int>& ranks) {
    const auto holders = static_cast<std::int64_t>(ranks.size());
    const bool divide = holders > 1 && !chunk.sizes.empty() && chunk.sizes[0] >= holders &&
                        bytes_of_chunk(entries_[chunk.entry], chunk) >= kLeastDividedBytes;
    for (std::int64_t i = 0; divide && i < holders; ++i) {
      // Rows are divided evenly. With chunks of ceil(rows / holders) rows, the last ranks would get
      // fewer rows than the others.
      const std::int64_t begin = chunk.sizes[0] * i / holders;
      const std::int64_t end = chunk.sizes[0] * (i + 1) / holders;
      assign(rows_of_chunk(chunk, begin, end - begin), ranks[static_cast<std::size_t>(i)]);
    }
    if (!divide && holders == 1) {
      assign(std::move(chunk), ranks[0]);
    } else if (!divide) {
      shared_.emplace_back(std::move(chunk), ranks);
    }
  }

  /// Assigns large chunks first, so that small chunks can even out the differences between ranks.
  std::vector<PlannedChunk> finish() {
    std::ranges::stable_sort(shared_, std::greater<>(), [this](const auto& shared) {
      return bytes_of_chunk(entries_[shared.first.entry], shared.first);
    });
    for (auto& [chunk, ranks] : shared_) {
      const int least = *std::ranges::min_element(
          ranks, {}, [this](int rank) { return bytes_[static_cast<std::size_t>(rank)]; });
      assign(std::move(chunk), least);
    }
    std::ranges::stable_sort(chunks_, {}, &PlannedChunk::entry);
    return std::move(chunks_);
  }

 private:
  void assign(PlannedChunk chunk, int rank) {
    chunk.rank = rank;
    bytes_[static_cast<std::size_t>(rank)] += bytes_of_chunk(entries_[chunk.entry], chunk);
    chunks_.push_back(std::move(chunk));
  }

  const std::vector<StateEntry>& entries_;
  std::vector<std::int64_t> bytes_;  ///< the bytes assigned to each rank so far
  std::vector<std::pair<PlannedChunk, std::vector<int>>> shared_;
  std::vector<PlannedChunk> chunks_;
};

/// Assigns chunks to files. A file can have a name only once, so the second block of a tensor is
/// stored in another file.
void number_files(SavePlan& plan, const std::vector<StateEntry>& entries) {
  std::map<std::pair<std::size_t, int>, int> boxes;
  for (PlannedChunk& chunk : plan.chunks) {
    const int earlier = boxes[{chunk.entry, chunk.rank}]++;
    const int first = entries[chunk.entry].is_parameter ? kWeightsFile : kOptimizerFile;
    chunk.file = earlier == 0 ? first : kOptimizerFile + earlier;
    plan.files = std::max(plan.files, chunk.file);
  }
}

}  // namespace

std::string SavePlan::file_name(const PlannedChunk& chunk) const {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", chunk.rank, chunk.file, files);
}

SavePlan plan_save(const std::vector<StateEntry>& entries, int world_size) {
  Writers writers(entries, world_size);
  for (std::size_t index = 0; index < entries.size(); ++index) {
    for (const Holders& holders : holders_of(entries[index].tensor)) {
      for (PlannedChunk& chunk : chunks_at(entries[index], index, holders.coordinate)) {
        writers.add(std::move(chunk), holders.ranks);
      }
    }
  }
  SavePlan plan{.chunks = writers.finish()};
  number_files(plan, entries);
  return plan;
}

std::int64_t fingerprint(const std::filesystem::path& folder,
                         const std::vector<StateEntry>& entries, const SavePlan& plan,
                         const std::string& others) {
  std::uint32_t crc = 0;
  const auto add = [&crc](const std::string& text) {
    crc = detail::crc32c(std::as_bytes(std::span(text)), crc);
  };
  add(std::filesystem::absolute(folder).lexically_normal().string());
  add(others);
  for (const StateEntry& entry : entries) {
    add(fmt::format("{} {} [{}]", fmt::join(entry.names, "="),
                    c10::toString(entry.tensor.scalar_type()), fmt::join(entry.stored.sizes, ",")));
  }
  for (const PlannedChunk& chunk : plan.chunks) {
    add(fmt::format("{} {} {} [{}] [{}]", chunk.entry, chunk.rank, chunk.file,
                    fmt::join(chunk.offset, ","), fmt::join(chunk.sizes, ",")));
  }
  return crc;
}

namespace {

FileChunk chunk_of(const PlannedChunk& planned, const StateEntry& entry) {
  const at::Tensor local = local_tensor(entry.tensor).detach();
  FileChunk chunk{.tensor = entry.stored.name,
                  .dtype = entry.tensor.scalar_type(),
                  .offset = planned.offset,
                  .sizes = planned.sizes,
                  .blocks = {}};
  for (const ChunkRows& part : planned.parts) {
    chunk.blocks.push_back({part.row, local_block(local, Box{{}, part.local_offset, part.sizes})});
  }
  return chunk;
}

}  // namespace

std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank) {
  std::map<std::string, std::vector<FileChunk>> by_name;
  for (const PlannedChunk& planned : plan.chunks) {
    if (planned.rank == rank) {
      by_name[plan.file_name(planned)].push_back(chunk_of(planned, entries[planned.entry]));
    }
  }
  std::vector<ShardFile> files;
  for (auto& [name, chunks] : by_name) {
    files.push_back({name, std::move(chunks)});
  }
  return files;
}

}  // namespace tessera::checkpoint

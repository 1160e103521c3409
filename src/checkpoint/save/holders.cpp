#include "save/holders.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "tessera/comm/detail/ranks_of_world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

using Coordinate = std::vector<std::int64_t>;

/// The coordinates on `root` of a mesh's ranks, in the mesh's order.
std::vector<Coordinate> coordinates_on(const DeviceMesh& root, const DeviceMesh& mesh) {
  std::vector<Coordinate> coordinates;
  const std::vector<int>& ranks = root.ranks();
  for (const int rank : mesh.ranks()) {
    const auto found = std::ranges::find(ranks, rank);
    coordinates.push_back(root.shape().coordinate(found - ranks.begin()));
  }
  return coordinates;
}

/// The dimensions along which coordinates differ.
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

/// For each position of a mesh, the ranks there: of the mesh itself, and of the other slices of the
/// mesh that it is a slice of.
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

}  // namespace

std::vector<Holders> holders_of(const at::Tensor& tensor, int world_size) {
  if (!tessera::is_distributed(tensor)) {
    return {{{}, comm::ranks_of_world(world_size)}};
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  const auto positions = ranks_by_position(spec.mesh);
  // By the coordinate along the dimensions that shard; the others hold copies.
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

}  // namespace tessera::checkpoint

#include "plan/kinds.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::planning {
namespace {

using Coordinate = std::vector<std::int64_t>;

/// Where any rank of the root is in its own submesh of the same dimensions as `mesh`. A dimension
/// that was flattened is made of several of the root's.
class Submesh {
 public:
  Submesh(const DeviceMesh& mesh, const MeshShape& root) : weights_(mesh.shape().ndim()) {
    const MeshShape& shape = mesh.shape();
    for (int dim = 0; dim < shape.ndim(); ++dim) {
      weights_[static_cast<std::size_t>(dim)].resize(static_cast<std::size_t>(root.ndim()));
      Coordinate at(static_cast<std::size_t>(shape.ndim()));
      const Coordinate begin = root.coordinate(rank_at(mesh, at));
      for (std::int64_t i = 1; i < shape.size(dim); ++i) {
        at[static_cast<std::size_t>(dim)] = i;
        note(dim, i, begin, root.coordinate(rank_at(mesh, at)));
      }
    }
  }

  Coordinate of(const Coordinate& in_root) const {
    Coordinate coordinate;
    for (const Coordinate& weights : weights_) {
      std::int64_t index = 0;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        index += weights[i] * in_root[i];
      }
      coordinate.push_back(index);
    }
    return coordinate;
  }

 private:
  static int rank_at(const DeviceMesh& mesh, const Coordinate& at) {
    return mesh.ranks()[static_cast<std::size_t>(mesh.shape().index(at))];
  }

  /// One step along a dimension of the root, alone, is as many steps here.
  void note(int dim, std::int64_t steps, const Coordinate& begin, const Coordinate& end) {
    Coordinate difference(begin.size());
    std::ranges::transform(end, begin, difference.begin(), std::minus<>());
    const auto moved = std::ranges::find_if(difference, [](std::int64_t d) { return d != 0; });
    const bool alone = std::ranges::count_if(difference, [](auto d) { return d != 0; }) == 1;
    if (alone && *moved == 1) {
      weights_[static_cast<std::size_t>(dim)]
              [static_cast<std::size_t>(moved - difference.begin())] = steps;
    }
  }

  std::vector<Coordinate> weights_;  ///< by dimension, then by the root's
};

/// A parameter that is laid out on a submesh.
struct Place {
  const ShardingSpec* spec;
  Coordinate sizes;
  Submesh submesh;
};

/// Parameters that are laid out alike are so on all ranks: one of each sort.
std::vector<Place> places_of(const Run& run) {
  std::vector<Place> places;
  std::set<std::tuple<const void*, const void*, Coordinate>> seen;
  for (const auto& [name, slot] : run.model->named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    if (!is_distributed(tensor)) {
      continue;
    }
    const ShardingSpec& spec = sharding_spec(tensor);
    if (seen.emplace(&*spec.layout, spec.mesh.id(), tensor.sizes().vec()).second) {
      places.push_back({&spec, tensor.sizes().vec(), Submesh(spec.mesh, run.mesh.shape())});
    }
  }
  return places;
}

}  // namespace

std::vector<RankKind> kinds_of(const Run& run) {
  std::map<std::vector<std::int64_t>, RankKind> by_sizes;
  const MeshShape& root = run.mesh.shape();
  const std::vector<Place> places = places_of(run);
  for (int rank = 0; rank < root.numel(); ++rank) {
    const Coordinate coordinate = root.coordinate(rank);
    std::vector<std::int64_t> sizes;
    if (run.sizes) {
      sizes = run.sizes(coordinate);
    }
    for (const Place& place : places) {
      sizes.push_back(local_numel(*place.spec->layout, place.sizes, place.submesh.of(coordinate)));
    }
    const auto [kind, is_new] = by_sizes.try_emplace(std::move(sizes));
    kind->second.first = is_new ? rank : kind->second.first;
    ++kind->second.count;
  }
  std::vector<RankKind> kinds;
  for (const auto& [sizes, kind] : by_sizes) {
    kinds.push_back(kind);
  }
  std::ranges::sort(kinds, {}, &RankKind::first);
  return kinds;
}

}  // namespace tessera::planning

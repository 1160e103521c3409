// Computes the sizes of a whole tensor from those of its parts. A rank knows only its own part, and
// from an uneven one it would infer another whole than its peers.

#include "tessera/dtensor/detail/agreed_sizes.h"

#include <algorithm>
#include <bit>
#include <variant>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/random.h"

namespace tessera::detail {
namespace {

using Sizes = std::vector<std::int64_t>;

/// A dimension of the tensor, and the dimensions of the mesh that shard it.
struct SplitDim {
  std::int64_t dim;
  std::vector<std::size_t> mesh_dims;
};

std::vector<SplitDim> split_dims(const Placements& placements, std::int64_t ndim) {
  std::vector<SplitDim> split;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (const auto* shard = std::get_if<Shard>(&placements[m])) {
      const std::int64_t dim = shard->dim < 0 ? shard->dim + ndim : shard->dim;
      auto found = std::ranges::find(split, dim, &SplitDim::dim);
      if (found == split.end()) {
        found = split.insert(split.end(), SplitDim{dim, {}});
      }
      found->mesh_dims.push_back(m);
    }
  }
  return split;
}

/// The coordinate of the rank that is `index` in row-major order.
Sizes coordinate_of(const Sizes& mesh_sizes, std::int64_t index) {
  Sizes coordinate(mesh_sizes.size());
  for (std::size_t m = mesh_sizes.size(); m-- > 0;) {
    coordinate[m] = index % mesh_sizes[m];
    index /= mesh_sizes[m];
  }
  return coordinate;
}

/// Whether that rank's part counts for the whole: it is the first of all copies.
bool counts(const SplitDim& split, const Sizes& coordinate) {
  for (std::size_t m = 0; m < coordinate.size(); ++m) {
    if (coordinate[m] != 0 && std::ranges::find(split.mesh_dims, m) == split.mesh_dims.end()) {
      return false;
    }
  }
  return true;
}

/// How many positions of `split` the ranks should have of a whole of `sizes`.
Sizes chunks_of_split(const SplitDim& split, const Layout& layout, const Sizes& sizes,
                      std::int64_t ranks) {
  Sizes chunks;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    chunks.push_back(local_size(layout, static_cast<int>(split.dim),
                                sizes[static_cast<std::size_t>(split.dim)],
                                coordinate_of(layout.mesh_sizes(), rank)));
  }
  return chunks;
}

/// Hashes what all parts of a tensor have in common: their type, and the sizes that are not split.
std::int64_t hash_of_rest(const at::Tensor& local, const std::vector<SplitDim>& split) {
  Sizes sizes = local.sizes().vec();
  for (const SplitDim& each : split) {
    sizes[static_cast<std::size_t>(each.dim)] = -1;
  }
  const std::string text = concat(c10::toString(local.scalar_type()), c10::IntArrayRef(sizes));
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// Each rank's size of each of `split`, and last the hash of the rest; with fake ranks, this rank's
/// own.
std::vector<Sizes> parts_of(const at::Tensor& local, const std::vector<SplitDim>& split,
                            const DeviceMesh& mesh) {
  Sizes own;
  for (const SplitDim& each : split) {
    own.push_back(local.size(each.dim));
  }
  if (!own.empty()) {
    own.push_back(hash_of_rest(local, split));
  }
  if (own.empty() || local.is_meta()) {
    return std::vector<Sizes>(static_cast<std::size_t>(mesh.size()), own);
  }
  return comm::gather_on_hosts(mesh.group_of_all_ranks(), own);
}

}  // namespace

std::vector<std::int64_t> agreed_sizes(const std::string& what, const at::Tensor& local,
                                       const DeviceMesh& mesh, const Placements& placements) {
  const Sizes mesh_sizes = mesh.shape().sizes();
  const std::vector<SplitDim> split = split_dims(placements, local.dim());
  const std::vector<Sizes> parts = parts_of(local, split, mesh);
  for (std::size_t rank = 1; rank < parts.size() && !split.empty(); ++rank) {
    TESSERA_CHECK(parts[rank].back() == parts[0].back(), what, " takes a plain tensor for ",
                  to_string(placements), ", but that of rank ", mesh.ranks()[rank],
                  " has another type than that of rank ", mesh.ranks()[0],
                  ", or other sizes along the dimensions that are not split; this rank's is ",
                  local.sizes(), " of ", c10::toString(local.scalar_type()));
  }
  Sizes sizes = local.sizes().vec();
  for (std::size_t i = 0; i < split.size(); ++i) {
    std::int64_t& whole = sizes[static_cast<std::size_t>(split[i].dim)];
    whole = 0;
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      if (counts(split[i], coordinate_of(mesh_sizes, rank))) {
        whole += parts[static_cast<std::size_t>(rank)][i];
      }
    }
  }
  const LayoutPtr layout = to_layout(mesh_sizes, placements, sizes);
  for (std::size_t i = 0; i < split.size(); ++i) {
    Sizes found;
    std::ranges::transform(parts, std::back_inserter(found),
                           [i](const Sizes& part) { return part[i]; });
    const Sizes chunks = chunks_of_split(split[i], *layout, sizes, mesh.size());
    TESSERA_CHECK(found == chunks, what, " takes a plain tensor for ", to_string(placements),
                  ", but the ranks hold ", c10::IntArrayRef(found), " positions along dimension ",
                  split[i].dim, ", and torch.chunk of ",
                  sizes[static_cast<std::size_t>(split[i].dim)], " is ", c10::IntArrayRef(chunks),
                  "; split it so");
  }
  return sizes;
}

}  // namespace tessera::detail

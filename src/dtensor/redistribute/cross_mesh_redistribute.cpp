// Redistribution to another mesh, in terms of two things that exist already: redistributions on one
// mesh, and one BoxExchange among ranks that are arranged in two ways. It works if the ranks of one
// mesh are a slice of the other; meshes of the same ranks are the slice over all dimensions. Below
// autograd: autograd/autograd_functions.cpp has the gradient, which is the redistribution back.

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "redistribute/box_exchange.h"
#include "redistribute/redistribute.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

/// A set, since the order of ranks is what may differ between the meshes.
std::set<int> members(const DeviceMesh& mesh) {
  return {mesh.ranks().begin(), mesh.ranks().end()};
}

/// A submesh over some dimensions of another mesh, through this rank; over none: of this rank
/// alone.
struct Slice {
  DeviceMesh mesh;
  std::vector<int> dims;
};

/// The coordinates of this rank stay on the dimensions that are not in `dims`. Makes no groups: a
/// mesh makes those at their first use.
DeviceMesh slice_through(const DeviceMesh& root, const std::vector<int>& dims) {
  std::vector<std::int64_t> sizes;
  for (const int dim : dims) {
    sizes.push_back(root.size(dim));
  }
  if (sizes.empty()) {
    sizes.push_back(1);
  }
  const MeshShape shape(sizes);
  std::vector<int> ranks;
  auto coordinate = root.coordinate();
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const auto inner = shape.coordinate(i);
    for (std::size_t d = 0; d < dims.size(); ++d) {
      coordinate[static_cast<std::size_t>(dims[d])] = inner[d];
    }
    ranks.push_back(root.ranks()[static_cast<std::size_t>(root.shape().index(coordinate))]);
  }
  return DeviceMesh(root.world(), std::move(ranks), shape);
}

/// The slice of `root` that holds the ranks of `part`, in whichever order; nullopt if there is
/// none. Tries all subsets of the dimensions: a mesh has few.
std::optional<Slice> slice_of(const DeviceMesh& root, const DeviceMesh& part) {
  const auto wanted = members(part);
  // A bit for each dimension of the root.
  for (unsigned chosen = 0; chosen < 1u << root.ndim(); ++chosen) {
    std::vector<int> dims;
    std::int64_t size = 1;
    for (int dim = 0; dim < root.ndim(); ++dim) {
      if ((chosen >> dim & 1) == 0) {
        continue;
      }
      dims.push_back(dim);
      size *= root.size(dim);
    }
    if (size != part.size()) {
      continue;
    }
    auto mesh = slice_through(root, dims);
    if (members(mesh) == wanted) {
      return Slice{std::move(mesh), std::move(dims)};
    }
  }
  return std::nullopt;
}

/// A layout on a slice as one on the mesh that it is a slice of, replicated on the other
/// dimensions.
LayoutPtr widened(LayoutPtr layout, const std::vector<int>& dims,
                  const std::vector<std::int64_t>& mesh_sizes) {
  auto digits = layout->dims();
  for (auto& dim : digits) {
    for (auto& digit : dim) {
      for (int& m : digit.mesh_dims) {
        m = dims[static_cast<std::size_t>(m)];
      }
    }
  }
  auto partial = layout->partial();
  for (auto& term : partial) {
    term.mesh_dim = dims[static_cast<std::size_t>(term.mesh_dim)];
  }
  return Layout::intern(mesh_sizes, std::move(digits), std::move(partial));
}

/// The inverse: the layout on the dimensions of a slice. Dimensions that other mesh dimensions
/// split become whole, and partial ones reduced: the caller redistributes to this layout, which
/// does both.
LayoutPtr narrowed(LayoutPtr layout, const Slice& slice) {
  const auto position = [&](int m) {
    const auto found = std::find(slice.dims.begin(), slice.dims.end(), m);
    return found == slice.dims.end() ? -1 : static_cast<int>(found - slice.dims.begin());
  };
  auto digits = layout->dims();
  for (auto& dim : digits) {
    for (auto& digit : dim) {
      std::vector<int> kept;
      for (const int m : digit.mesh_dims) {
        if (position(m) >= 0) {
          kept.push_back(position(m));
        }
      }
      digit.mesh_dims = std::move(kept);
    }
  }
  return Layout::intern(slice.mesh.shape().sizes(), std::move(digits));
}

/// Whether a layout means the same on both meshes, so that nothing has to be exchanged. The slice
/// over no dimensions has one of size 1 that the root lacks: a layout on it could not be widened.
bool is_arranged_as(const Slice& slice, const DeviceMesh& mesh) {
  return !slice.dims.empty() && slice.mesh.ranks() == mesh.ranks() &&
         slice.mesh.shape().sizes() == mesh.shape().sizes();
}

/// The spec of the tensor `like` once it has `sharding`.
TensorSpecPtr on(const ShardingSpec& sharding, const TensorSpec& like) {
  return intern_spec({sharding, like.sizes, like.strides, like.dtype});
}

/// Between two meshes of the same ranks: what is partial is reduced first, then one exchange.
at::Tensor rearranged(at::Tensor local, const TensorSpecPtr& spec, const ShardingSpec& target) {
  const auto& mesh = spec->sharding.mesh;
  // gradient_layout: the layout without its partials. Boxes are copied, so terms of a sum are added
  // up first, and made again at the end.
  const auto from = gradient_layout(spec->sharding.layout);
  const auto to = gradient_layout(target.layout);
  local = redistribute_local(local, spec, from);
  std::vector<std::vector<Box>> wanted;
  // In the order of the source's mesh, whose ranks exchange.
  for (const int rank : mesh.ranks()) {
    const auto& ranks = target.mesh.ranks();
    const auto position = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    wanted.push_back(owned_boxes(*to, spec->sizes, target.mesh.shape().coordinate(position)));
  }
  const BoxExchange exchange(shard_holders(mesh, from, spec->sizes), std::move(wanted));
  const ShardingSpec exchanged{target.mesh, to};
  local = exchange.run(local, local_sizes(exchanged, spec->sizes), mesh);
  return redistribute_local(local, on(exchanged, *spec), target.layout);
}

/// To a slice of the source's mesh: redistributes there to the slice's target, then drops the other
/// dimensions, on which the tensor is replicated.
at::Tensor to_slice(const at::Tensor& local, const TensorSpecPtr& spec, const Slice& slice,
                    const ShardingSpec& target) {
  const auto& sizes = spec->sharding.mesh.shape().sizes();
  const bool same = is_arranged_as(slice, target.mesh);
  // Arranged otherwise, the slice keeps what the source's layout splits over it: only the other
  // dimensions are gathered before the exchange.
  const ShardingSpec on_slice{slice.mesh,
                              same ? target.layout : narrowed(spec->sharding.layout, slice)};
  auto kept = redistribute_local(local, spec, widened(on_slice.layout, slice.dims, sizes));
  return same ? kept : rearranged(std::move(kept), on(on_slice, *spec), target);
}

/// From a slice to the mesh that it is a slice of.
at::Tensor from_slice(const at::Tensor& local, const TensorSpecPtr& spec, const Slice& slice,
                      const ShardingSpec& target) {
  const auto& sizes = target.mesh.shape().sizes();
  const bool same = is_arranged_as(slice, spec->sharding.mesh);
  const ShardingSpec on_slice{slice.mesh,
                              same ? spec->sharding.layout : narrowed(target.layout, slice)};
  const auto kept = same ? local : rearranged(local, spec, on_slice);
  const ShardingSpec on_target{target.mesh, widened(on_slice.layout, slice.dims, sizes)};
  return redistribute_local(kept, on(on_target, *spec), target.layout);
}

}  // namespace

at::Tensor cross_mesh_redistribute(const at::Tensor& local, const TensorSpecPtr& spec,
                                   const ShardingSpec& target) {
  const auto& source = spec->sharding.mesh;
  if (source.world() == target.mesh.world() && target.mesh.contains_this_rank()) {
    // Each rank names the slice that it is in. One outside of its target gets the error below.
    if (const auto slice = slice_of(source, target.mesh)) {
      return to_slice(local, spec, *slice, target);
    }
    if (const auto slice = slice_of(target.mesh, source)) {
      return from_slice(local, spec, *slice, target);
    }
  }
  fail("redistribute from ", to_string(source), " to ", to_string(target.mesh),
       ": neither is a slice of the other, nor are they of the same ranks, this one among them; "
       "make both from one mesh by slicing, flatten() or unflatten()");
}

at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target) {
  const auto sizes = tensor.sizes().vec();
  const auto reduced = gradient_layout(target.layout);  // the target without its partials
  const auto& mesh = target.mesh;
  // One box of all elements, which the source holds; none for a tensor without elements. A layout
  // on a mesh of no dimensions splits nothing.
  const std::vector<std::int64_t> no_coordinate;
  auto all =
      owned_boxes(*Layout::replicated({}, static_cast<int>(sizes.size())), sizes, no_coordinate);
  std::vector<ShardHolders> held;
  if (!all.empty()) {
    held.push_back({std::move(all), {source}});
  }
  std::vector<std::vector<Box>> wanted;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    wanted.push_back(owned_boxes(*reduced, sizes, mesh.shape().coordinate(rank)));
  }
  const ShardingSpec arrived{mesh, reduced};
  auto local = BoxExchange(std::move(held), std::move(wanted))
                   .run(tensor, local_sizes(arrived, sizes), mesh);
  const auto spec = intern_spec({arrived, sizes, contiguous_strides(sizes), tensor.scalar_type()});
  return redistribute_local(local, spec, target.layout);
}

}  // namespace tessera::detail

#include "other_mesh.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "autograd_functions.h"
#include "box_exchange.h"
#include "redistribute.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

std::set<int> members(const DeviceMesh& mesh) {
  return {mesh.ranks().begin(), mesh.ranks().end()};
}

/// A mesh over some dimensions of another, through this rank; over none of them: of this rank.
struct Slice {
  DeviceMesh mesh;
  std::vector<int> dims;
};

DeviceMesh slice_through(const DeviceMesh& whole, const std::vector<int>& dims) {
  std::vector<std::int64_t> sizes;
  for (const int dim : dims) sizes.push_back(whole.size(dim));
  if (sizes.empty()) sizes.push_back(1);
  const MeshShape shape(sizes);
  std::vector<int> ranks;
  auto coordinate = whole.coordinate();
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const auto inner = shape.coordinate(i);
    for (std::size_t d = 0; d < dims.size(); ++d) {
      coordinate[static_cast<std::size_t>(dims[d])] = inner[d];
    }
    ranks.push_back(whole.ranks()[static_cast<std::size_t>(whole.shape().index(coordinate))]);
  }
  return DeviceMesh(whole.world(), std::move(ranks), shape);
}

/// The slice of `whole` that holds the ranks of `part`, in whichever order.
std::optional<Slice> slice_of(const DeviceMesh& whole, const DeviceMesh& part) {
  const auto wanted = members(part);
  for (unsigned chosen = 0; chosen < 1u << whole.ndim(); ++chosen) {
    std::vector<int> dims;
    std::int64_t size = 1;
    for (int dim = 0; dim < whole.ndim(); ++dim) {
      if ((chosen >> dim & 1) == 0) continue;
      dims.push_back(dim);
      size *= whole.size(dim);
    }
    if (size != part.size()) continue;
    auto mesh = slice_through(whole, dims);
    if (members(mesh) == wanted) return Slice{std::move(mesh), std::move(dims)};
  }
  return std::nullopt;
}

/// A layout on a slice, on the mesh that it is a slice of: replicated on the other dimensions.
LayoutPtr widened(LayoutPtr layout, const std::vector<int>& dims,
                  const std::vector<std::int64_t>& mesh_sizes) {
  auto digits = layout->dims();
  for (auto& dim : digits) {
    for (auto& digit : dim) {
      for (int& m : digit.mesh_dims) m = dims[static_cast<std::size_t>(m)];
    }
  }
  auto partial = layout->partial();
  for (auto& term : partial) term.mesh_dim = dims[static_cast<std::size_t>(term.mesh_dim)];
  return Layout::intern(mesh_sizes, std::move(digits), std::move(partial));
}

/// The other way: what a layout says of the dimensions of a slice, nothing being partial.
LayoutPtr narrowed(LayoutPtr layout, const Slice& slice) {
  const auto place = [&](int m) {
    const auto found = std::find(slice.dims.begin(), slice.dims.end(), m);
    return found == slice.dims.end() ? -1 : static_cast<int>(found - slice.dims.begin());
  };
  auto digits = layout->dims();
  for (auto& dim : digits) {
    for (auto& digit : dim) {
      std::vector<int> kept;
      for (const int m : digit.mesh_dims) {
        if (place(m) >= 0) kept.push_back(place(m));
      }
      digit.mesh_dims = std::move(kept);
    }
  }
  return Layout::intern(slice.mesh.shape().sizes(), std::move(digits));
}

bool is_arranged_as(const Slice& slice, const DeviceMesh& mesh) {
  return !slice.dims.empty() && slice.mesh.ranks() == mesh.ranks() &&
         slice.mesh.shape().sizes() == mesh.shape().sizes();
}

TensorSpecPtr on(const ShardingSpec& sharding, const TensorSpec& like) {
  return intern_spec({sharding, like.sizes, like.strides, like.dtype});
}

/// Between two meshes of the same ranks.
at::Tensor rearranged(at::Tensor local, const TensorSpecPtr& spec, const ShardingSpec& target) {
  const auto& mesh = spec->sharding.mesh;
  const auto from = gradient_layout(spec->sharding.layout);
  const auto to = gradient_layout(target.layout);
  local = redistribute_local(local, spec, from);
  std::vector<std::vector<Box>> wanted;
  for (const int rank : mesh.ranks()) {
    const auto& ranks = target.mesh.ranks();
    const auto position = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    wanted.push_back(owned_boxes(*to, spec->sizes, target.mesh.shape().coordinate(position)));
  }
  const BoxExchange exchange(held_parts(mesh, from, spec->sizes), std::move(wanted));
  const ShardingSpec arrived{target.mesh, to};
  local = exchange.run(local, local_sizes(arrived, spec->sizes), mesh);
  return redistribute_local(local, on(arrived, *spec), target.layout);
}

/// To a mesh of some of this one's ranks, or of all.
at::Tensor to_slice(const at::Tensor& local, const TensorSpecPtr& spec, const Slice& slice,
                    const ShardingSpec& target) {
  const auto& sizes = spec->sharding.mesh.shape().sizes();
  const bool same = is_arranged_as(slice, target.mesh);
  const ShardingSpec on_slice{slice.mesh,
                              same ? target.layout : narrowed(spec->sharding.layout, slice)};
  auto kept = redistribute_local(local, spec, widened(on_slice.layout, slice.dims, sizes));
  return same ? kept : rearranged(std::move(kept), on(on_slice, *spec), target);
}

at::Tensor from_slice(const at::Tensor& local, const TensorSpecPtr& spec, const Slice& slice,
                      const ShardingSpec& target) {
  const auto& sizes = target.mesh.shape().sizes();
  const bool same = is_arranged_as(slice, spec->sharding.mesh);
  const ShardingSpec on_slice{slice.mesh,
                              same ? spec->sharding.layout : narrowed(target.layout, slice)};
  const auto kept = same ? local : rearranged(local, spec, on_slice);
  const ShardingSpec whole{target.mesh, widened(on_slice.layout, slice.dims, sizes)};
  return redistribute_local(kept, on(whole, *spec), target.layout);
}

}  // namespace

at::Tensor move_to_mesh(const at::Tensor& local, const TensorSpecPtr& spec,
                        const ShardingSpec& target) {
  const auto& source = spec->sharding.mesh;
  if (source.world() == target.mesh.world() && target.mesh.contains_this_rank()) {
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
  const auto whole = gradient_layout(target.layout);
  std::vector<HeldPart> held;
  const auto& mesh = target.mesh;
  const std::vector<std::int64_t> nowhere;
  auto all = owned_boxes(*Layout::replicated({}, static_cast<int>(sizes.size())), sizes, nowhere);
  if (!all.empty()) held.push_back({std::move(all), {source}});
  std::vector<std::vector<Box>> wanted;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    wanted.push_back(owned_boxes(*whole, sizes, mesh.shape().coordinate(rank)));
  }
  const ShardingSpec arrived{mesh, whole};
  auto local = BoxExchange(std::move(held), std::move(wanted))
                   .run(tensor, local_sizes(arrived, sizes), mesh);
  const auto spec = intern_spec({arrived, sizes, contiguous_strides(sizes), tensor.scalar_type()});
  return redistribute_local(local, spec, target.layout);
}

}  // namespace tessera::detail

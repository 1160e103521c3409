#include "local_axis.h"

#include <algorithm>
#include <span>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"

namespace tessera::detail {
namespace {

const Digit& digit_at(const Axis& axis) {
  return axis.layout->digits(axis.dim)[axis.digit];
}

std::int64_t local_extent(std::int64_t extent, const DeviceMesh& mesh,
                          std::span<const int> mesh_dims) {
  for (int d : mesh_dims) extent = chunk_size(extent, mesh.size(d), mesh.local_rank(d));
  return extent;
}

/// The local extents of the digits of `dim`; of the whole dimension if nothing splits it.
std::vector<std::int64_t> local_extents(const Layout& layout, int dim, std::int64_t size,
                                        const DeviceMesh& mesh) {
  if (layout.digits(dim).empty()) return {size};
  std::vector<std::int64_t> extents;
  for (const auto& digit : layout.digits(dim)) {
    extents.push_back(local_extent(digit.extent == 0 ? size : digit.extent, mesh, digit.mesh_dims));
  }
  return extents;
}

}  // namespace

Axis Axis::split_by(LayoutPtr layout, int dim, int mesh_dim) {
  const auto& digits = layout->digits(dim);
  const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
    return std::find(d.mesh_dims.begin(), d.mesh_dims.end(), mesh_dim) != d.mesh_dims.end();
  });
  TESSERA_CHECK(digit != digits.end(), "internal: mesh dimension ", mesh_dim,
                " does not split dimension ", dim, " of ", to_string(*layout));
  return {layout, dim, static_cast<std::size_t>(digit - digits.begin())};
}

std::int64_t Axis::whole_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                                const std::vector<int>& mesh_dims) const {
  const auto& digit = digit_at(*this);
  const auto extent = digit.extent == 0 ? sizes[static_cast<std::size_t>(dim)] : digit.extent;
  const auto kept = digit.mesh_dims.size() - mesh_dims.size();
  return local_extent(extent, mesh, std::span(digit.mesh_dims).first(kept));
}

std::vector<std::int64_t> extents_around(const std::vector<Axis>& axes, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh) {
  std::vector<std::int64_t> products{1};
  auto axis = axes.begin();
  for (int dim = 0; dim < layout->tensor_ndim(); ++dim) {
    const bool has_axis = axis != axes.end() && axis->dim == dim;
    const auto extents = local_extents(has_axis ? *axis->layout : *layout, dim,
                                       sizes[static_cast<std::size_t>(dim)], mesh);
    for (std::size_t i = 0; i < extents.size(); ++i) {
      if (has_axis && axis->digit == i) {
        products.push_back(1);
      } else {
        products.back() *= extents[i];
      }
    }
    if (has_axis) ++axis;
  }
  return products;
}

std::vector<Piece> pieces_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims) {
  std::vector<Piece> pieces{{0, extent}};
  for (int d : mesh_dims) {
    std::vector<Piece> finer;
    for (const auto& piece : pieces) {
      for (std::int64_t i = 0; i < mesh.size(d); ++i) {
        finer.push_back({piece.offset + chunk_offset(piece.size, mesh.size(d), i),
                         chunk_size(piece.size, mesh.size(d), i)});
      }
    }
    pieces = std::move(finer);
  }
  return pieces;
}

bool only_tail_is_short(const std::vector<Piece>& pieces) {
  const auto full = pieces.front().size;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].size > 0 && pieces[i].offset != full * static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims) {
  std::int64_t rank = 0;
  for (int d : mesh_dims) rank = rank * mesh.size(d) + mesh.local_rank(d);
  return static_cast<std::size_t>(rank);
}

}  // namespace tessera::detail

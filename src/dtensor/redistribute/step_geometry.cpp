// The arithmetic of redistribute_steps.cpp: the ranks' positions of a digit before and after a
// step, and the sizes around it in the local tensor. Pure: ranks compute each other's chunks by it.

#include "redistribute/step_geometry.h"

#include <algorithm>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>
#include <span>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"

namespace tessera::detail {
namespace {

const Digit& digit_at(const StepDigit& at) {
  return at.layout->digits(at.dim)[at.digit];
}

/// This rank's share of `extent` positions: each mesh dimension cuts, by torch.chunk, what the one
/// before it left.
std::int64_t local_extent(std::int64_t extent, const DeviceMesh& mesh,
                          std::span<const int> mesh_dims) {
  for (int d : mesh_dims) {
    extent = chunk_size(extent, mesh.size(d), mesh.local_rank(d));
  }
  return extent;
}

/// The local extents of the digits of `dim`; the size of a dimension that is not sharded.
std::vector<std::int64_t> local_extents(const Layout& layout, int dim, std::int64_t size,
                                        const DeviceMesh& mesh) {
  if (layout.digits(dim).empty()) {
    return {size};
  }
  std::vector<std::int64_t> extents;
  for (const auto& digit : layout.digits(dim)) {
    // Extent 0: the digit is the whole dimension.
    extents.push_back(local_extent(digit.extent == 0 ? size : digit.extent, mesh, digit.mesh_dims));
  }
  return extents;
}

}  // namespace

StepDigit StepDigit::cut_by(LayoutPtr layout, int dim, int mesh_dim) {
  const auto& digits = layout->digits(dim);
  const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
    return std::find(d.mesh_dims.begin(), d.mesh_dims.end(), mesh_dim) != d.mesh_dims.end();
  });
  TESSERA_CHECK(digit != digits.end(), "internal: mesh dimension ", mesh_dim,
                " does not cut dimension ", dim, " of ", to_string(*layout));
  return {layout, dim, static_cast<std::size_t>(digit - digits.begin())};
}

std::int64_t StepDigit::gathered_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                                        const std::vector<int>& mesh_dims) const {
  const auto& digit = digit_at(*this);
  const auto extent = digit.extent == 0 ? sizes[static_cast<std::size_t>(dim)] : digit.extent;
  // A step acts on the last mesh dimensions of a digit: those before them still cut it.
  const auto kept = digit.mesh_dims.size() - mesh_dims.size();
  return local_extent(extent, mesh, std::span(digit.mesh_dims).first(kept));
}

std::vector<std::int64_t> extents_around(const std::vector<StepDigit>& digits, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh) {
  std::vector<std::int64_t> products{1};
  auto next = digits.begin();
  for (int dim = 0; dim < layout->tensor_ndim(); ++dim) {
    // In the dimension of a digit its own layout counts: one digit of an all-to-all is cut only
    // after the step. Before any digit the first product grows, after it the next.
    const bool has_digit = next != digits.end() && next->dim == dim;
    const auto extents = local_extents(has_digit ? *next->layout : *layout, dim,
                                       sizes[static_cast<std::size_t>(dim)], mesh);
    for (const auto& [i, extent] : ranges::views::enumerate(extents)) {
      if (has_digit && next->digit == i) {
        products.push_back(1);  // the digit is left out, and the next product begins
      } else {
        products.back() *= extent;
      }
    }
    if (has_digit) {
      ++next;
    }
  }
  return products;
}

std::vector<Chunk> chunks_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims) {
  std::vector<Chunk> chunks{{0, extent}};
  for (const int dim : mesh_dims) {
    const auto count = mesh.size(dim);
    // Later mesh dimensions go faster, as in the numbering of a group's ranks.
    std::vector<Chunk> finer;
    for (const auto& [chunk, i] :
         ranges::views::cartesian_product(chunks, ranges::views::iota(std::int64_t{0}, count))) {
      finer.push_back(
          {chunk.offset + chunk_offset(chunk.size, count, i), chunk_size(chunk.size, count, i)});
    }
    chunks = std::move(finer);
  }
  return chunks;
}

bool only_last_are_short(const std::vector<Chunk>& chunks) {
  const auto full = chunks.front().size;
  for (const auto& [i, chunk] : ranges::views::enumerate(chunks)) {
    // An empty chunk has no positions that could be out of order.
    if (chunk.size > 0 && chunk.offset != full * static_cast<std::int64_t>(i)) {
      return false;
    }
  }
  return true;
}

std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims) {
  std::int64_t rank = 0;
  for (int d : mesh_dims) {
    rank = rank * mesh.size(d) + mesh.local_rank(d);
  }
  return static_cast<std::size_t>(rank);
}

}  // namespace tessera::detail

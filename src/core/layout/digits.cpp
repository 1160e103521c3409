// The canonical form of a dimension's digits. Interning compares layouts by content, so two
// descriptions of the same cuts must become one: equal layouts would otherwise look different, and
// be redistributed into one another.
#include "layout/digits.h"

#include <algorithm>
#include <span>
#include <utility>

namespace tessera::detail {
namespace {

using MeshSizes = std::vector<std::int64_t>;

/// Whether torch.chunk cuts `extent * factor` positions over `mesh_dims` exactly where it cuts
/// `extent` positions, each `factor` long. Then a local digit of `factor` may join one of `extent`.
/// Exact and not only by divisibility, as uneven cuts may scale as well: 5 over 3 gives 2, 2 and 1,
/// and 10 over 3 gives 4, 4 and 2.
bool cuts_scale(const MeshSizes& mesh, std::int64_t extent, std::int64_t factor,
                std::span<const int> mesh_dims) {
  if (mesh_dims.empty() || extent == 0) {
    return true;
  }
  const auto parts = mesh_size(mesh, mesh_dims.front());
  const auto chunk = ceil_div(extent, parts);
  if (ceil_div(extent * factor, parts) != chunk * factor) {
    return false;
  }
  // torch.chunk gives chunks of two sizes at most: full ones, and one remainder. Both are cut
  // again.
  const auto rest = mesh_dims.subspan(1);
  return cuts_scale(mesh, chunk, factor, rest) && cuts_scale(mesh, extent % chunk, factor, rest);
}

/// The largest number of positions of the digit that a coordinate holds.
std::int64_t largest_chunk(const MeshSizes& mesh, const Digit& digit) {
  auto extent = digit.extent;
  for (const int dim : digit.mesh_dims) {
    extent = ceil_div(extent, mesh_size(mesh, dim));
  }
  return extent;
}

/// Whether `major` followed by `minor` is one digit over the mesh dimensions of both. Two cases.
/// The minor digit is local: then the major one may include it. Or the major one is cut down to
/// single positions: then the mesh dimensions of the minor one continue its cuts.
bool is_one_digit(const MeshSizes& mesh, const Digit& major, const Digit& minor) {
  if (major.mesh_dims.empty()) {
    return mesh_product(mesh, minor.mesh_dims) == 1;
  }
  const bool adjoin = minor.mesh_dims.empty() || largest_chunk(mesh, major) == 1;
  return adjoin && cuts_scale(mesh, major.extent, minor.extent, major.mesh_dims);
}

/// Keeps the order: the mesh dimensions of the minor digit cut what those of the major one left.
void append(Digit& major, const Digit& minor) {
  major.extent *= minor.extent;
  major.mesh_dims.insert(major.mesh_dims.end(), minor.mesh_dims.begin(), minor.mesh_dims.end());
}

/// One position that is not cut: it adds nothing, except as the only digit of a dimension.
bool is_trivial(const Digit& digit) {
  return digit.extent == 1 && digit.mesh_dims.empty();
}

}  // namespace

std::int64_t mesh_product(const MeshSizes& mesh_sizes, const std::vector<int>& mesh_dims) {
  std::int64_t product = 1;
  for (const int dim : mesh_dims) {
    product *= mesh_size(mesh_sizes, dim);
  }
  return product;
}

/// One pass from major to minor is enough: a merged digit is compared with the next one again.
std::vector<Digit> canonical_digits(const MeshSizes& mesh_sizes, std::vector<Digit> digits) {
  std::vector<Digit> out;
  for (auto& digit : digits) {
    if (is_trivial(digit) && digits.size() > 1) {
      continue;
    }
    if (!out.empty() && is_one_digit(mesh_sizes, out.back(), digit)) {
      append(out.back(), digit);
    } else {
      out.push_back(std::move(digit));
    }
  }
  if (out.size() != 1) {
    return out;
  }
  // A single digit spans the dimension: without its extent the layout does not depend on sizes.
  if (out.front().mesh_dims.empty()) {
    return {};
  }
  out.front().extent = 0;
  return out;
}

/// Meshes with dimensions of size 1 are common (one configuration for any number of GPUs): without
/// this a plan would communicate in groups of one rank. The common case returns at once.
LayoutPtr without_unit_mesh_dims(LayoutPtr layout) {
  const auto& mesh = layout->mesh_sizes();
  const auto is_unit = [&](int dim) { return mesh_size(mesh, dim) == 1; };
  if (std::find(mesh.begin(), mesh.end(), 1) == mesh.end()) {
    return layout;
  }
  auto dims = layout->dims();
  for (auto& digits : dims) {
    for (auto& digit : digits) {
      std::erase_if(digit.mesh_dims, is_unit);
    }
  }
  auto partial = layout->partial();
  std::erase_if(partial, [&](const auto& p) { return is_unit(p.mesh_dim); });
  return Layout::intern(mesh, std::move(dims), std::move(partial));
}

}  // namespace tessera::detail

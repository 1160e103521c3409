#include "tessera/core/layout_math.h"

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// A range of a tensor dimension: where it lies globally and locally.
struct Run {
  std::int64_t global = 0;
  std::int64_t local = 0;
  std::int64_t size = 0;
};

/// A range of one digit.
struct Piece {
  std::int64_t extent = 0;
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

Piece piece(const Layout& layout, const Digit& digit, std::int64_t whole,
            std::span<const std::int64_t> coordinate) {
  Piece out{digit.extent == 0 ? whole : digit.extent, 0, 0};
  out.size = out.extent;
  for (const int dim : digit.mesh_dims) {
    const auto d = static_cast<std::size_t>(dim);
    const auto parts = layout.mesh_sizes()[d];
    out.offset += chunk_offset(out.size, parts, coordinate[d]);
    out.size = chunk_size(out.size, parts, coordinate[d]);
  }
  return out;
}

void check_arguments(const Layout& layout, std::span<const std::int64_t> sizes,
                     std::span<const std::int64_t> coordinate) {
  TESSERA_CHECK(static_cast<int>(sizes.size()) == layout.tensor_ndim(), "layout ",
                to_string(layout), " was given sizes of ", sizes.size(), " dimensions");
  TESSERA_CHECK(static_cast<int>(coordinate.size()) == layout.mesh_ndim(), "layout ",
                to_string(layout), " on a mesh of ", layout.mesh_ndim(),
                " dimensions was given a coordinate of ", coordinate.size());
}

/// `inner` repeated for each position of `piece`, whose positions are `global` and `local` apart.
std::vector<Run> repeat(const Piece& piece, const std::vector<Run>& inner, std::int64_t global,
                        std::int64_t local) {
  std::vector<Run> out;
  for (std::int64_t i = 0; i < piece.size; ++i) {
    for (const auto& run : inner) {
      out.push_back({(piece.offset + i) * global + run.global, i * local + run.local, run.size});
    }
  }
  return out;
}

/// The ranges of a dimension that a coordinate owns, in order; built from the minor digit outwards.
std::vector<Run> runs(const Layout& layout, int dim, std::int64_t size,
                      std::span<const std::int64_t> coordinate) {
  const auto& digits = layout.digits(dim);
  if (digits.empty()) return size > 0 ? std::vector<Run>{{0, 0, size}} : std::vector<Run>{};
  std::vector<Run> out{{0, 0, 1}};
  std::int64_t global = 1;
  std::int64_t local = 1;
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    const auto p = piece(layout, *digit, size, coordinate);
    if (local == 0 || p.size == 0) return {};
    if (local == global) {
      out = {{p.offset * global, 0, p.size * local}};
    } else {
      out = repeat(p, out, global, local);
    }
    global *= p.extent;
    local *= p.size;
  }
  return out;
}

void append(Box& box, const Run& run) {
  box.global_offset.push_back(run.global);
  box.local_offset.push_back(run.local);
  box.sizes.push_back(run.size);
}

}  // namespace

std::int64_t chunk_size(std::int64_t size, std::int64_t chunks, std::int64_t index) {
  const auto chunk = (size + chunks - 1) / chunks;
  return std::clamp(size - index * chunk, std::int64_t{0}, chunk);
}

std::int64_t chunk_offset(std::int64_t size, std::int64_t chunks, std::int64_t index) {
  return std::min(size, index * ((size + chunks - 1) / chunks));
}

std::int64_t local_size(const Layout& layout, int tensor_dim, std::int64_t size,
                        std::span<const std::int64_t> coordinate) {
  const auto& digits = layout.digits(tensor_dim);
  if (digits.empty()) return size;
  std::int64_t out = 1;
  for (const auto& digit : digits) out *= piece(layout, digit, size, coordinate).size;
  return out;
}

std::vector<std::int64_t> local_sizes(const Layout& layout, std::span<const std::int64_t> sizes,
                                      std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::vector<std::int64_t> out(sizes.begin(), sizes.end());
  for (int d = 0; d < layout.tensor_ndim(); ++d) {
    auto& size = out[static_cast<std::size_t>(d)];
    size = local_size(layout, d, size, coordinate);
  }
  return out;
}

std::int64_t local_numel(const Layout& layout, std::span<const std::int64_t> sizes,
                         std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::int64_t out = 1;
  for (int d = 0; d < layout.tensor_ndim(); ++d) {
    out *= local_size(layout, d, sizes[static_cast<std::size_t>(d)], coordinate);
  }
  return out;
}

std::vector<Box> owned_boxes(const Layout& layout, std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::vector<Box> boxes(1);
  for (int d = 0; d < layout.tensor_ndim(); ++d) {
    const auto along = runs(layout, d, sizes[static_cast<std::size_t>(d)], coordinate);
    std::vector<Box> next;
    for (const auto& box : boxes) {
      for (const auto& run : along) append(next.emplace_back(box), run);
    }
    boxes = std::move(next);
  }
  return boxes;
}

std::vector<std::int64_t> global_indices(const Layout& layout, int tensor_dim, std::int64_t size,
                                         std::span<const std::int64_t> coordinate) {
  std::vector<std::int64_t> out;
  for (const auto& run : runs(layout, tensor_dim, size, coordinate)) {
    const auto begin = out.size();
    out.resize(begin + static_cast<std::size_t>(run.size));
    std::iota(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end(), run.global);
  }
  return out;
}

}  // namespace tessera

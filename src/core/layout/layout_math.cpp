#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>

#include "layout/digits.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/core/mesh_shape.h"

namespace tessera {

// MeshShape has the sizes and names of a mesh's dimensions, and numbers the positions in the mesh
// row-major, as PyTorch's DeviceMesh does. DeviceMesh (mesh/) adds the ranks.

MeshShape::MeshShape(std::vector<std::int64_t> sizes, std::vector<std::string> names)
    : sizes_(std::move(sizes)), names_(std::move(names)) {
  for (const auto size : sizes_) {
    TESSERA_CHECK(size >= 1, "mesh ", to_string(*this), " has a dimension of size ", size,
                  "; every size must be at least 1");
  }
  TESSERA_CHECK(names_.empty() || names_.size() == sizes_.size(), "mesh of ", sizes_.size(),
                " dimensions has ", names_.size(),
                " names; pass a name for each dimension, or none");
  for (auto name = names_.begin(); name != names_.end(); ++name) {
    TESSERA_CHECK(!name->empty(),
                  "a mesh dimension has an empty name; leave all names out, or "
                  "name each dimension");
    TESSERA_CHECK(std::find(names_.begin(), name, *name) == name,
                  "two mesh dimensions are called \"", *name, "\"; names must be unique");
  }
}

std::int64_t MeshShape::numel() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{1}, std::multiplies<>());
}

int MeshShape::dim(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  TESSERA_CHECK(found != names_.end(), "mesh ", to_string(*this), " has no dimension called \"",
                name, "\"");
  return static_cast<int>(found - names_.begin());
}

int MeshShape::dim(int dim) const {
  TESSERA_CHECK(dim >= -ndim() && dim < ndim(), "mesh ", to_string(*this), " has no dimension ",
                dim, "; pass 0 to ", ndim() - 1, ", or -1 to ", -ndim(), " to count from the end");
  return dim < 0 ? dim + ndim() : dim;
}

std::vector<std::int64_t> MeshShape::coordinate(std::int64_t index) const {
  TESSERA_CHECK(index >= 0 && index < numel(), "position ", index, " is outside mesh ",
                to_string(*this), ", which has ", numel(), " positions");
  std::vector<std::int64_t> out(sizes_.size());
  for (auto&& [at, size] : ranges::views::zip(out, sizes_) | ranges::views::reverse) {
    at = index % size;
    index /= size;
  }
  return out;
}

std::int64_t MeshShape::index(const std::vector<std::int64_t>& coordinate) const {
  TESSERA_CHECK(coordinate.size() == sizes_.size(), "a coordinate of ", coordinate.size(),
                " numbers was passed for mesh ", to_string(*this),
                "; pass one number for each dimension");
  std::int64_t out = 0;
  for (const auto& [size, at] : ranges::views::zip(sizes_, coordinate)) {
    TESSERA_CHECK(at >= 0 && at < size, "coordinate ", at, " is outside mesh ", to_string(*this));
    out = out * size + at;
  }
  return out;
}

std::string to_string(const MeshShape& shape) {
  std::string out = "(";
  for (const auto& [dim, size] : ranges::views::enumerate(shape.sizes())) {
    out += dim > 0 ? ", " : "";
    if (dim < shape.names().size()) {
      out += shape.names()[dim] + "=";
    }
    out += std::to_string(size);
  }
  return out + ")";
}

std::ostream& operator<<(std::ostream& stream, const MeshShape& shape) {
  return stream << to_string(shape);
}

// These functions compute which elements of a tensor any rank stores, without communication.
// Divisions follow torch.chunk: full chunks of ceil(size / n), then a shorter chunk, then empty
// chunks.

namespace {

/// A contiguous range of positions along a tensor dimension. `global` and `local` are the indices
/// of the first position in the global tensor and in the local tensor.
struct Run {
  std::int64_t global = 0;
  std::int64_t local = 0;
  std::int64_t size = 0;
};

struct Chunk {
  std::int64_t extent = 0;  ///< number of positions of the undivided Digit
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// Returns the chunk of a Digit (sub-dimension) that the rank at `coordinate` stores. Each mesh
/// dimension divides the chunk of the previous mesh dimension. `dim_size`: replaces extent 0.
Chunk chunk_of(const Layout& layout, const Digit& digit, std::int64_t dim_size,
               std::span<const std::int64_t> coordinate) {
  Chunk out{digit.extent == 0 ? dim_size : digit.extent, 0, 0};
  out.size = out.extent;
  for (const int dim : digit.mesh_dims) {
    const auto parts = detail::mesh_size(layout.mesh_sizes(), dim);
    const auto index = coordinate[static_cast<std::size_t>(dim)];
    out.offset += chunk_offset(out.size, parts, index);
    out.size = chunk_size(out.size, parts, index);
  }
  return out;
}

void check_arguments(const Layout& layout, std::span<const std::int64_t> sizes,
                     std::span<const std::int64_t> coordinate) {
  detail::check_ndim(layout, sizes);
  TESSERA_CHECK(static_cast<int>(coordinate.size()) == layout.mesh_ndim(), "layout ",
                to_string(layout), " on a mesh of ", layout.mesh_ndim(),
                " dimensions was given a coordinate of ", coordinate.size(),
                " numbers; pass one number for each mesh dimension");
}

/// Repeats the ranges `inner` for each position of `chunk`. Consecutive repetitions are
/// `global_stride` apart in the global tensor and `local_stride` apart in the local tensor.
std::vector<Run> repeat(const Chunk& chunk, const std::vector<Run>& inner,
                        std::int64_t global_stride, std::int64_t local_stride) {
  std::vector<Run> out;
  for (std::int64_t i = 0; i < chunk.size; ++i) {
    for (const auto& run : inner) {
      out.push_back({(chunk.offset + i) * global_stride + run.global, i * local_stride + run.local,
                     run.size});
    }
  }
  return out;
}

/// Returns, in order, the contiguous ranges of a tensor dimension that the rank at `coordinate`
/// stores. The loop visits the Digits (sub-dimensions) from the innermost outwards.
std::vector<Run> runs(const Layout& layout, int dim, std::int64_t size,
                      std::span<const std::int64_t> coordinate) {
  const auto& digits = layout.digits(dim);
  if (digits.empty()) {
    return size > 0 ? std::vector<Run>{{0, 0, size}} : std::vector<Run>{};
  }
  std::vector<Run> out{{0, 0, 1}};
  std::int64_t global_stride = 1;
  std::int64_t local_stride = 1;
  for (const Digit& digit : digits | ranges::views::reverse) {
    const Chunk chunk = chunk_of(layout, digit, size, coordinate);
    if (chunk.size == 0) {
      return {};
    }
    // If the rank has all positions of the inner Digits (sub-dimensions), its chunk is one range.
    // Otherwise the inner ranges repeat for each position of the chunk.
    if (local_stride == global_stride) {
      out = {{chunk.offset * global_stride, 0, chunk.size * local_stride}};
    } else {
      out = repeat(chunk, out, global_stride, local_stride);
    }
    global_stride *= chunk.extent;
    local_stride *= chunk.size;
  }
  return out;
}

}  // namespace

/// If there are fewer positions than chunks, the last chunks have size 0, unlike in torch.chunk.
std::int64_t chunk_size(std::int64_t size, std::int64_t chunks, std::int64_t index) {
  const auto full = detail::ceil_div(size, chunks);
  return std::clamp(size - index * full, std::int64_t{0}, full);
}

/// The offset of an empty chunk is `size`, so that no offset exceeds `size`.
std::int64_t chunk_offset(std::int64_t size, std::int64_t chunks, std::int64_t index) {
  return std::min(size, index * detail::ceil_div(size, chunks));
}

/// Returns the product of the local sizes of the Digits (sub-dimensions): a rank has the same inner
/// positions for each outer position.
std::int64_t local_size(const Layout& layout, int tensor_dim, std::int64_t size,
                        std::span<const std::int64_t> coordinate) {
  const auto& digits = layout.digits(tensor_dim);
  if (digits.empty()) {
    return size;
  }
  std::int64_t out = 1;
  for (const auto& digit : digits) {
    out *= chunk_of(layout, digit, size, coordinate).size;
  }
  return out;
}

std::vector<std::int64_t> local_sizes(const Layout& layout, std::span<const std::int64_t> sizes,
                                      std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::vector<std::int64_t> out(sizes.begin(), sizes.end());
  for (auto&& [dim, size] : ranges::views::enumerate(out)) {
    size = local_size(layout, static_cast<int>(dim), size, coordinate);
  }
  return out;
}

std::int64_t local_numel(const Layout& layout, std::span<const std::int64_t> sizes,
                         std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::int64_t out = 1;
  for (const auto& [dim, size] : ranges::views::enumerate(sizes)) {
    out *= local_size(layout, static_cast<int>(dim), size, coordinate);
  }
  return out;
}

/// A 0-d tensor is one block (Box) whose lists are empty. An empty shard has no block.
std::vector<Box> owned_boxes(const Layout& layout, std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> coordinate) {
  check_arguments(layout, sizes, coordinate);
  std::vector<Box> boxes(1);
  for (const auto& [dim, size] : ranges::views::enumerate(sizes)) {
    const auto along = runs(layout, static_cast<int>(dim), size, coordinate);
    std::vector<Box> next;
    for (const auto& box : boxes) {
      for (const auto& run : along) {
        Box& longer = next.emplace_back(box);
        longer.global_offset.push_back(run.global);
        longer.local_offset.push_back(run.local);
        longer.sizes.push_back(run.size);
      }
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

// Converts a FlatPlace (blocks of a tensor) to a list of integers and back, because operator
// schemas have no type for blocks of a tensor.

std::vector<std::int64_t> flat_place(const FlatPlace& place) {
  std::vector<std::int64_t> numbers = place.sizes;
  for (const Box& box : place.boxes) {
    for (const auto* part : {&box.global_offset, &box.local_offset, &box.sizes}) {
      numbers.insert(numbers.end(), part->begin(), part->end());
    }
  }
  return numbers;
}

FlatPlace read_flat_place(std::span<const std::int64_t> numbers, std::size_t ndim) {
  TESSERA_CHECK(ndim > 0 && numbers.size() >= ndim && (numbers.size() - ndim) % (3 * ndim) == 0,
                "a flat place of ", numbers.size(), " numbers does not fit a tensor of ", ndim,
                " dimensions; each dimension needs one size, and three numbers for each box");
  const auto next = [&numbers, ndim] {
    std::vector<std::int64_t> part(numbers.begin(),
                                   numbers.begin() + static_cast<std::ptrdiff_t>(ndim));
    numbers = numbers.subspan(ndim);
    return part;
  };
  FlatPlace place{next(), {}};
  while (!numbers.empty()) {
    Box& box = place.boxes.emplace_back();
    box.global_offset = next();
    box.local_offset = next();
    box.sizes = next();
  }
  return place;
}

void detail::check_ndim(const Layout& layout, std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(static_cast<int>(sizes.size()) == layout.tensor_ndim(), "layout ",
                to_string(layout), " was given sizes of ", sizes.size(),
                " dimensions, but is for tensors of ", layout.tensor_ndim(), " dimensions");
}

}  // namespace tessera

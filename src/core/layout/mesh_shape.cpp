// The shape of a mesh, without ranks: sizes, names, and positions as coordinates, row-major as in
// PyTorch's DeviceMesh. core plans with it; mesh/ adds the ranks.
#include "tessera/core/mesh_shape.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include "tessera/core/error.h"

namespace tessera {

/// A size of 1 is allowed and common: the same program runs on fewer devices. A size of 0 would be
/// a mesh of no ranks.
MeshShape::MeshShape(std::vector<std::int64_t> sizes, std::vector<std::string> names)
    : sizes_(std::move(sizes)), names_(std::move(names)) {
  for (const auto size : sizes_) {
    TESSERA_CHECK(size >= 1, "mesh ", to_string(*this), " has a dimension of size ", size,
                  "; every size must be at least 1");
  }
  TESSERA_CHECK(names_.empty() || names_.size() == sizes_.size(), "mesh of ", sizes_.size(),
                " dimensions was given ", names_.size(), " names; give one a dimension, or none");
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

/// Linear: meshes have a handful of dimensions.
int MeshShape::dim(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  TESSERA_CHECK(found != names_.end(), "mesh ", to_string(*this), " has no dimension called \"",
                name, "\"");
  return static_cast<int>(found - names_.begin());
}

int MeshShape::dim(int dim) const {
  TESSERA_CHECK(dim >= -ndim() && dim < ndim(), "mesh ", to_string(*this), " has no dimension ",
                dim, "; give 0 to ", ndim() - 1, ", or -1 to ", -ndim(), " from the end");
  return dim < 0 ? dim + ndim() : dim;
}

/// Row-major: the last dimension varies fastest, so that ranks of one host usually are neighbours
/// along it.
std::vector<std::int64_t> MeshShape::coordinate(std::int64_t index) const {
  TESSERA_CHECK(index >= 0 && index < numel(), "position ", index, " is outside mesh ",
                to_string(*this), ", which has ", numel());
  std::vector<std::int64_t> out(sizes_.size());
  for (auto&& [at, size] : ranges::views::zip(out, sizes_) | ranges::views::reverse) {
    at = index % size;
    index /= size;
  }
  return out;
}

/// The inverse of coordinate().
std::int64_t MeshShape::index(const std::vector<std::int64_t>& coordinate) const {
  TESSERA_CHECK(coordinate.size() == sizes_.size(), "a coordinate of ", coordinate.size(),
                " numbers was given for mesh ", to_string(*this));
  std::int64_t out = 0;
  for (const auto& [size, at] : ranges::views::zip(sizes_, coordinate)) {
    TESSERA_CHECK(at >= 0 && at < size, "coordinate ", at, " is outside mesh ", to_string(*this));
    out = out * size + at;
  }
  return out;
}

/// "(dp=2, tp=4)", or "(2, 4)" without names.
std::string to_string(const MeshShape& shape) {
  std::string out = "(";
  for (const auto& [dim, size] : ranges::views::enumerate(shape.sizes())) {
    out += dim > 0 ? ", " : "";
    if (dim < shape.names().size()) {  // a message about a bad shape may have too few
      out += shape.names()[dim] + "=";
    }
    out += std::to_string(size);
  }
  return out + ")";
}

std::ostream& operator<<(std::ostream& stream, const MeshShape& shape) {
  return stream << to_string(shape);
}

}  // namespace tessera

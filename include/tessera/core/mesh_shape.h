#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The sizes and names of a mesh's dimensions, outermost first. The positions in the mesh are
/// numbered in row-major order. A value type, as thread safe as std::vector.
class MeshShape {
 public:
  MeshShape() = default;
  /// `names` is empty or has one unique name for each size. Throws Error on a size < 1 or an
  /// invalid name.
  explicit MeshShape(std::vector<std::int64_t> sizes, std::vector<std::string> names = {});

  int ndim() const { return static_cast<int>(sizes_.size()); }
  /// Returns the size of dimension `dim`; a negative `dim` counts from the end. Throws Error if
  /// there is no such dimension.
  std::int64_t size(int dim) const { return sizes_[static_cast<std::size_t>(this->dim(dim))]; }
  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  const std::vector<std::string>& names() const { return names_; }
  /// The number of positions in the mesh: the product of the sizes.
  std::int64_t numel() const;
  /// Returns the index of the dimension `name`. Throws Error, with a list of the names, if there is
  /// no such dimension.
  int dim(std::string_view name) const;
  /// Returns `dim` as an index from 0; a negative `dim` counts from the end. Throws Error if there
  /// is no such dimension.
  int dim(int dim) const;
  /// Returns the coordinate of position `index`. Throws Error if `index` is out of range.
  std::vector<std::int64_t> coordinate(std::int64_t index) const;
  std::int64_t index(const std::vector<std::int64_t>& coordinate) const;

  friend bool operator==(const MeshShape&, const MeshShape&) = default;

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::string> names_;
};

/// Returns the mesh shape as text: "(dp=2, tp=2)", or "(2, 2)" without names.
std::string to_string(const MeshShape& shape);
/// Writes to_string(shape) to `stream`.
std::ostream& operator<<(std::ostream& stream, const MeshShape& shape);

}  // namespace tessera
TESSERA_API_END

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Whether reductions by `a` and by `b` over two mesh dimensions can be swapped: equal reductions,
/// or sum and average.
bool commute(ReduceOp a, ReduceOp b);

/// A sub-dimension of a tensor dimension. The first mesh dimension in `mesh_dims` divides the
/// `extent` positions into chunks like torch.chunk. Each further mesh dimension divides every chunk
/// again. Without mesh dimensions the Digit is not sharded.
struct Digit {
  std::int64_t extent = 0;  ///< number of positions; 0: all positions of the tensor dimension
  std::vector<int> mesh_dims;
  friend auto operator<=>(const Digit&, const Digit&) = default;
};

/// A mesh dimension over which a tensor is Partial: the value of the tensor is the reduction by
/// `op` of the local tensors along this mesh dimension.
struct PartialDim {
  int mesh_dim = 0;
  ReduceOp op = ReduceOp::kSum;
  friend auto operator<=>(const PartialDim&, const PartialDim&) = default;
};

class LayoutPtr;

/// The layout of a tensor on a mesh. Each tensor dimension has a list of sub-dimensions (Digit),
/// outermost first, whose extents multiply to the dimension's size. `partial` lists the mesh
/// dimensions over which the tensor is partial. Reductions run from the innermost to the outermost
/// mesh dimension. The tensor is replicated over all other mesh dimensions. docs/sharding.md
/// compares layouts with PyTorch's placements.
///
/// Equal layouts are one immutable object: comparing and hashing use the pointer. Layouts are never
/// freed. Thread safe.
///
/// Canonical form: an unsharded dimension has no Digit. A single Digit has extent 0. Neighbouring
/// Digits are merged if one Digit gives every rank the same positions. `partial` is ordered by mesh
/// dimension.
class Layout {
 public:
  using Dims = std::vector<std::vector<Digit>>;

  /// Returns the layout with the given content, in canonical form. Throws Error if a mesh dimension
  /// is out of range or used twice, or if one of several Digits has extent 0.
  static LayoutPtr intern(std::vector<std::int64_t> mesh_sizes, Dims dims,
                          std::vector<PartialDim> partial = {});
  /// Returns the layout of a tensor that is replicated on every mesh dimension.
  static LayoutPtr replicated(std::vector<std::int64_t> mesh_sizes, int tensor_ndim);

  LayoutPtr ptr() const;

  const std::vector<std::int64_t>& mesh_sizes() const { return mesh_sizes_; }
  int mesh_ndim() const { return static_cast<int>(mesh_sizes_.size()); }
  int tensor_ndim() const { return static_cast<int>(dims_.size()); }
  const Dims& dims() const { return dims_; }
  const std::vector<Digit>& digits(int tensor_dim) const {
    return dims_[static_cast<std::size_t>(tensor_dim)];
  }
  const std::vector<PartialDim>& partial() const { return partial_; }

  /// Whether the tensor is neither sharded nor partial on any mesh dimension.
  bool is_replicated() const { return replicated_; }
  bool is_partial() const { return !partial_.empty(); }
  /// Returns the tensor dimension that mesh dimension `mesh_dim` shards; -1 if there is none.
  int sharded_dim(int mesh_dim) const { return sharded_dim_[static_cast<std::size_t>(mesh_dim)]; }
  /// Returns the entry of partial() for mesh dimension `mesh_dim`; nullptr if partial() has none.
  const PartialDim* partial_on(int mesh_dim) const;
  /// Returns the mesh dimensions that shard tensor dimension `tensor_dim`, in the order of division
  /// (outermost first).
  std::vector<int> mesh_dims_of(int tensor_dim) const;

 private:
  class Table;
  struct Content;

  explicit Layout(Content content);

  std::vector<std::int64_t> mesh_sizes_;
  Dims dims_;
  std::vector<PartialDim> partial_;
  std::vector<int> sharded_dim_;  // the results of sharded_dim() for each mesh dimension
  bool replicated_ = false;
};

/// A pointer to a layout, or nullptr.
class LayoutPtr {
 public:
  LayoutPtr(std::nullptr_t = nullptr) noexcept {}
  explicit LayoutPtr(const Layout* layout) noexcept : layout_(layout) {}

  const Layout* get() const { return layout_; }
  const Layout& operator*() const { return *layout_; }
  const Layout* operator->() const { return layout_; }
  explicit operator bool() const { return layout_ != nullptr; }
  friend bool operator==(const LayoutPtr&, const LayoutPtr&) = default;

 private:
  const Layout* layout_ = nullptr;
};

inline LayoutPtr Layout::ptr() const {
  return LayoutPtr(this);
}

/// Converts PyTorch's `placements` (one per mesh dimension) to a layout of a tensor of global
/// `sizes` on a mesh of `mesh_sizes`. Negative Shard dimensions count from the end. Not collective.
/// Throws Error for a dimension out of range, for a wrong number of placements, and for a
/// StridedShard with unaligned chunks.
LayoutPtr to_layout(const std::vector<std::int64_t>& mesh_sizes, const Placements& placements,
                    std::span<const std::int64_t> sizes);
/// Converts `layout` of a tensor of global `sizes` to PyTorch's placements. A dimension that is not
/// divided in the order of the mesh dimensions gets a StridedShard. Throws Error if placements
/// cannot describe the layout.
Placements to_placements(const Layout& layout, std::span<const std::int64_t> sizes);
/// Returns a text, such as "[m1,m0 | -] partial{m2:sum}". m0 is mesh dimension 0. "-" is an
/// unsharded tensor dimension. "2 x 8:m0" is an unsharded Digit of 2, and a Digit of 8 that is
/// sharded over m0.
std::string to_string(const Layout& layout);
/// Writes to_string(layout) to `stream`.
std::ostream& operator<<(std::ostream& stream, const Layout& layout);
/// Writes to_string(*layout) to `stream`; "no layout" for a null pointer.
std::ostream& operator<<(std::ostream& stream, const LayoutPtr& layout);

}  // namespace tessera
TESSERA_API_END

template <>
struct std::hash<tessera::LayoutPtr> {
  std::size_t operator()(const tessera::LayoutPtr& layout) const noexcept {
    return std::hash<const void*>()(layout.get());
  }
};

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

/// Whether a reduction by `a` over one mesh dimension and a reduction by `b` over another mesh
/// dimension can be swapped without changing the result: equal reductions, or sum and average.
bool commute(ReduceOp a, ReduceOp b);

/// One of the sub-dimensions into which a tensor dimension is unflattened. The first mesh dimension
/// in `mesh_dims` divides the `extent` positions into chunks as torch.chunk does, and each further
/// mesh dimension divides every chunk again. `extent` need not be divisible by the sizes of the
/// mesh dimensions. A Digit without mesh dimensions is not sharded.
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

/// The layout of a tensor on a mesh. For each tensor dimension the layout has a list of
/// sub-dimensions (Digit), outermost first, whose extents multiply to the dimension's size. The
/// layout also lists the mesh dimensions over which the tensor is partial. The tensor is replicated
/// over every other mesh dimension. docs/sharding.md compares layouts with PyTorch's placements.
///
/// Layouts are immutable and interned: equal layouts are one object, so comparing and hashing use
/// the pointer. Canonical form: a dimension that is not sharded has no Digit; a single Digit has
/// extent 0; neighbouring Digits are merged if one Digit gives every rank the same positions;
/// `partial` is ordered by mesh dimension. For example, a Digit of 2 positions sharded over 2 ranks
/// and an inner, unsharded Digit of 8 are merged. So a layout depends on tensor sizes only if a
/// dimension has several Digits (a flattened view of a sharded inner dimension). Layouts are never
/// freed.
///
/// If a tensor is partial with different reductions over several mesh dimensions, inner mesh
/// dimensions are reduced before outer mesh dimensions.
///
/// Thread safe: layouts are immutable, and intern() locks.
class Layout {
 public:
  using Dims = std::vector<std::vector<Digit>>;

  /// Returns the layout with the given content, in canonical form. Throws Error if a mesh dimension
  /// is used twice or is out of range, or if one of several Digits (sub-dimensions) has extent 0.
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

/// Converts PyTorch's `placements`, one for each mesh dimension, to the layout of a tensor of
/// global `sizes` on a mesh of `mesh_sizes`. Each mesh dimension divides the chunks that earlier
/// mesh dimensions have made; a StridedShard changes this order. Negative Shard dimensions count
/// from the end. Not collective. Throws Error for a dimension out of range, a list of the wrong
/// length, or a StridedShard whose chunks do not align with the other shards of its dimension.
LayoutPtr to_layout(const std::vector<std::int64_t>& mesh_sizes, const Placements& placements,
                    std::span<const std::int64_t> sizes);
/// Converts `layout` of a tensor of global `sizes` to PyTorch's placements. A tensor dimension that
/// is not divided in the order of the mesh dimensions gets a StridedShard. Throws Error if no list
/// of placements describes the layout: if a dimension has several Digits (sub-dimensions), and a
/// Digit other than the innermost has shards of unequal size.
Placements to_placements(const Layout& layout, std::span<const std::int64_t> sizes);
/// Returns a text: "[m1,m0 | -] partial{m2:sum}". m0 is mesh dimension 0; "-" is a tensor dimension
/// that is not sharded. Several Digits (sub-dimensions) are written "2 x 8:m0": 2 positions that
/// are not divided, and within each of them 8 positions that are divided over m0.
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

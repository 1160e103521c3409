#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera {

/// One factor of a tensor dimension: `extent` positions, split over `mesh_dims` in this order, each
/// level as torch.chunk splits what the level before left (so extents that don't divide are fine).
/// No mesh dimension: the digit stays local.
struct Digit {
  std::int64_t extent = 0;  ///< 0: the whole dimension (the only digit of it)
  std::vector<int> mesh_dims;
  friend bool operator==(const Digit&, const Digit&) = default;
};

/// The mesh dimension over which a tensor is a pending reduction.
struct PartialDim {
  int mesh_dim = 0;
  ReduceOp op = ReduceOp::kSum;
  friend bool operator==(const PartialDim&, const PartialDim&) = default;
};

class LayoutPtr;

/// How a tensor lies on a mesh: for each tensor dimension an ordered list of digits, major first,
/// whose extents multiply to the size; and the mesh dimensions over which it is partial. A mesh
/// dimension that appears nowhere replicates.
///
/// Immutable and interned: two equal layouts are one object, so that comparing and hashing is
/// comparing pointers. Canonical form: a dimension that no mesh dimension splits has no digits; a
/// dimension with a single digit has extent 0; neighbouring digits that are one digit are merged
/// ([2 over dp][8] is [16 over dp] for dp=2); `partial` is ordered by mesh dimension. Layouts
/// therefore do not depend on tensor sizes, except where a dimension has several digits (a
/// flattened view of a sharded inner dimension). Those that do go with their last LayoutPtr, so
/// that a program of ever new sizes keeps no more than it uses; the others, of which a mesh has
/// few, stay, and cost nothing to hold.
///
/// Partial over several mesh dimensions of unlike reductions: each term of an outer mesh dimension
/// is itself the reduction over the inner ones, so inner mesh dimensions are reduced first.
class Layout {
 public:
  using Dims = std::vector<std::vector<Digit>>;

  /// The one layout with this content, canonicalised. Thread safe.
  /// Throws Error if a mesh dimension is used twice or is out of range, or if one of several digits
  /// of a dimension lacks its extent.
  static LayoutPtr intern(std::vector<std::int64_t> mesh_sizes, Dims dims,
                          std::vector<PartialDim> partial = {});
  /// Replicated on every mesh dimension.
  static LayoutPtr replicated(std::vector<std::int64_t> mesh_sizes, int tensor_ndim);
  /// How many layouts there are in this process.
  static std::size_t count();

  /// A hold on this layout.
  LayoutPtr ptr() const;

  const std::vector<std::int64_t>& mesh_sizes() const { return mesh_sizes_; }
  int mesh_ndim() const { return static_cast<int>(mesh_sizes_.size()); }
  int tensor_ndim() const { return static_cast<int>(dims_.size()); }
  const Dims& dims() const { return dims_; }
  const std::vector<Digit>& digits(int tensor_dim) const {
    return dims_[static_cast<std::size_t>(tensor_dim)];
  }
  const std::vector<PartialDim>& partial() const { return partial_; }

  /// No shard and no partial.
  bool is_replicated() const { return replicated_; }
  bool is_partial() const { return !partial_.empty(); }
  /// The tensor dimension that `mesh_dim` splits, or -1.
  int sharded_dim(int mesh_dim) const { return sharded_dim_[static_cast<std::size_t>(mesh_dim)]; }
  /// The reduction pending over `mesh_dim`, or nullptr.
  const PartialDim* partial_on(int mesh_dim) const;
  /// The mesh dimensions that split `tensor_dim`, in order of application.
  std::vector<int> mesh_dims_of(int tensor_dim) const;

 private:
  friend class LayoutPtr;
  class Table;
  struct Content;

  explicit Layout(Content content, std::uint64_t hash);
  /// Ends a hold on a layout that depends on sizes.
  static void release(const Layout* layout);

  std::vector<std::int64_t> mesh_sizes_;
  Dims dims_;
  std::vector<PartialDim> partial_;
  std::vector<int> sharded_dim_;  // of each mesh dimension
  bool replicated_ = false;
  bool sized_ = false;  // depends on sizes: its holders are counted
  mutable std::atomic<std::int64_t> holders_{0};
  const std::uint64_t hash_;
};

/// Holds a layout, or none. As cheap as a pointer but for layouts that depend on sizes, whose
/// holders are counted. Thread safe as a shared_ptr is.
class LayoutPtr {
 public:
  LayoutPtr(std::nullptr_t = nullptr) noexcept {}
  LayoutPtr(const LayoutPtr& other) noexcept : LayoutPtr(other.layout_) {}
  LayoutPtr(LayoutPtr&& other) noexcept : layout_(std::exchange(other.layout_, nullptr)) {}
  LayoutPtr& operator=(LayoutPtr other) noexcept {
    std::swap(layout_, other.layout_);
    return *this;
  }
  ~LayoutPtr() {
    if (layout_ != nullptr && layout_->sized_) Layout::release(layout_);
  }

  const Layout* get() const { return layout_; }
  const Layout& operator*() const { return *layout_; }
  const Layout* operator->() const { return layout_; }
  explicit operator bool() const { return layout_ != nullptr; }
  friend bool operator==(const LayoutPtr&, const LayoutPtr&) = default;

 private:
  friend class Layout;
  explicit LayoutPtr(const Layout* layout) noexcept : layout_(layout) {
    if (layout != nullptr && layout->sized_) {
      layout->holders_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  const Layout* layout_ = nullptr;
};

inline LayoutPtr Layout::ptr() const {
  return LayoutPtr(this);
}

/// From PyTorch's form. Later mesh dimensions split what earlier ones left, and a StridedShard is
/// turned into the order that it stands for. `sizes` are the tensor's global sizes. Negative Shard
/// dimensions count from the end. Throws Error for a dimension out of range, a list of the wrong
/// length, or a StridedShard whose pieces don't line up with the shards that follow it.
LayoutPtr to_layout(const std::vector<std::int64_t>& mesh_sizes, const Placements& placements,
                    std::span<const std::int64_t> sizes);
/// To PyTorch's form; an order other than the mesh's becomes StridedShard. Throws Error where that
/// form cannot say it: several digits of which one in front is split unevenly.
Placements to_placements(const Layout& layout, std::span<const std::int64_t> sizes);
/// Compact and exact, for messages: "[m1,m0 | -] partial{m2:sum}"; m0 is mesh dimension 0, the
/// digits of a dimension are written "2 x 8:m0" (a local digit of 2, then 8 split over m0).
std::string to_string(const Layout& layout);

}  // namespace tessera

template <>
struct std::hash<tessera::LayoutPtr> {
  std::size_t operator()(const tessera::LayoutPtr& layout) const noexcept {
    return std::hash<const void*>()(layout.get());
  }
};

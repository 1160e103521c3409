// Placements <-> Layout. NOTE [Orders and strided shards]
// PyTorch applies a placement list in mesh order; a mesh dimension that came earlier in time but
// later in the mesh shows as a StridedShard, whose split factor is the number of pieces that the
// later mesh dimensions will make of what it leaves. So the order of application is found by
// inserting mesh dimensions from the last to the first, each behind those whose sizes multiply to
// its split factor; and back, the split factor is the product of those in front of it that are
// later in the mesh. A split factor that no order explains is a local digit in front (a flattened
// view, a fused weight): take() cuts it off the dimension, which must be even.
#include <algorithm>
#include <optional>
#include <utility>

#include "canonical_digits.h"
#include "tessera/core/error.h"
#include "tessera/core/layout.h"
#include "without_unit_mesh_dims.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;

/// One mesh dimension that splits a tensor dimension; a plain Shard has split factor 1.
struct Cut {
  int mesh_dim = 0;
  std::int64_t split_factor = 1;
};

std::int64_t mesh_size(const Sizes& mesh, int dim) {
  return mesh[static_cast<std::size_t>(dim)];
}

/// The order of application that explains all split factors, if there is one.
std::optional<std::vector<int>> pure_order(const Sizes& mesh, const std::vector<Cut>& cuts) {
  std::vector<int> order;
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) {
    std::int64_t in_front = 1;
    auto at = order.begin();
    while (at != order.end() && in_front < cut->split_factor) in_front *= mesh_size(mesh, *at++);
    if (in_front != cut->split_factor) return std::nullopt;
    order.insert(at, cut->mesh_dim);
  }
  return order;
}

/// The digits of one dimension while cuts are applied to what earlier ones left.
class Cutter {
 public:
  Cutter(const Sizes& mesh, std::int64_t size) : mesh_(mesh), digits_{Digit{size, {}}} {}

  /// False where the digits' boundaries don't line up with the cut.
  bool take(const Cut& cut) {
    const auto at = skip(cut.split_factor);
    if (!at) return false;
    for (auto i = *at; i < digits_.size(); ++i) {
      auto& digit = digits_[i];
      const bool last = i + 1 == digits_.size();
      const auto left = remaining(digit);
      if (!last && left == 1) continue;
      if (!last && (!left || *left % mesh_size(mesh_, cut.mesh_dim) != 0)) return false;
      digit.mesh_dims.push_back(cut.mesh_dim);
      return true;
    }
    return false;
  }

  std::vector<Digit> digits() && { return std::move(digits_); }

 private:
  /// How many positions of the digit each coordinate holds, where all hold equally many.
  std::optional<std::int64_t> remaining(const Digit& digit) const {
    const auto parts = detail::mesh_product(mesh_, digit.mesh_dims);
    if (digit.extent % parts != 0) return std::nullopt;
    return digit.extent / parts;
  }

  /// The index of the digit that follows `factor` pieces, cutting one digit in two if need be.
  std::optional<std::size_t> skip(std::int64_t factor) {
    for (std::size_t i = 0; i < digits_.size(); ++i) {
      if (factor == 1) return i;
      const auto left = remaining(digits_[i]);
      if (!left || *left == 0) return std::nullopt;
      if (*left % factor == 0 && *left != factor) {
        const auto behind = *left / factor;
        digits_[i].extent /= behind;
        digits_.insert(digits_.begin() + static_cast<std::ptrdiff_t>(i) + 1, Digit{behind, {}});
        return i + 1;
      }
      if (factor % *left != 0) return std::nullopt;
      factor /= *left;
    }
    if (factor != 1) return std::nullopt;
    digits_.push_back(Digit{1, {}});
    return digits_.size() - 1;
  }

  const Sizes& mesh_;
  std::vector<Digit> digits_;
};

std::optional<std::vector<Digit>> to_digits(const Sizes& mesh, const std::vector<Cut>& cuts,
                                            std::int64_t size) {
  if (cuts.empty()) return std::vector<Digit>{};
  if (auto order = pure_order(mesh, cuts)) return std::vector<Digit>{Digit{0, std::move(*order)}};
  Cutter cutter(mesh, size);
  for (const auto& cut : cuts) {
    if (!cutter.take(cut)) return std::nullopt;
  }
  return std::move(cutter).digits();
}

/// A placement list taken apart: the cuts of each tensor dimension, in mesh order, and the
/// partials.
struct Parts {
  std::vector<std::vector<Cut>> cuts;
  std::vector<PartialDim> partial;
};

std::size_t tensor_dim(const Placements& placements, std::int64_t dim, std::int64_t ndim) {
  TESSERA_CHECK(dim >= -ndim && dim < ndim, "placements ", to_string(placements),
                " shard dimension ", dim, " of a tensor with ", ndim,
                " dimensions; shard one that it has, or replicate it");
  return static_cast<std::size_t>(dim < 0 ? dim + ndim : dim);
}

Parts take_apart(const Placements& placements, std::size_t ndim) {
  Parts parts;
  parts.cuts.resize(ndim);
  const auto cut = [&](std::int64_t dim, Cut how) {
    parts.cuts[tensor_dim(placements, dim, static_cast<std::int64_t>(ndim))].push_back(how);
  };
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const auto mesh_dim = static_cast<int>(i);
    if (const auto* shard = std::get_if<Shard>(&placements[i])) {
      cut(shard->dim, {mesh_dim, 1});
    } else if (const auto* strided = std::get_if<StridedShard>(&placements[i])) {
      TESSERA_CHECK(strided->split_factor >= 1, "placement ", to_string(placements[i]),
                    " has a split factor below 1");
      cut(strided->dim, {mesh_dim, strided->split_factor});
    } else if (const auto* partial = std::get_if<Partial>(&placements[i])) {
      parts.partial.push_back({mesh_dim, partial->op});
    }
  }
  return parts;
}

/// The product of what digits in front of `digit` leave local when `mesh_dim` is applied, and of
/// the mesh dimensions in front of it that are later in the mesh.
std::int64_t split_factor(const Sizes& mesh, const std::vector<Digit>& digits, int mesh_dim) {
  std::int64_t factor = 1;
  for (const auto& digit : digits) {
    const auto& order = digit.mesh_dims;
    const auto at = std::find(order.begin(), order.end(), mesh_dim);
    if (at == order.end()) {
      factor *= digit.extent;
      for (const int m : order) factor /= m < mesh_dim ? mesh_size(mesh, m) : 1;
      continue;
    }
    for (auto m = order.begin(); m != at; ++m) factor *= *m > mesh_dim ? mesh_size(mesh, *m) : 1;
    break;
  }
  return std::max(factor, std::int64_t{1});
}

Placement placement_of(const Layout& layout, int mesh_dim) {
  if (const auto* partial = layout.partial_on(mesh_dim)) return Partial{partial->op};
  const int dim = layout.sharded_dim(mesh_dim);
  if (dim < 0) return Replicate{};
  const auto factor = split_factor(layout.mesh_sizes(), layout.digits(dim), mesh_dim);
  if (factor == 1) return Shard{dim};
  return StridedShard{dim, factor};
}

bool has_several_digits(const Layout& layout) {
  return std::any_of(layout.dims().begin(), layout.dims().end(),
                     [](const auto& digits) { return digits.size() > 1; });
}

/// nullptr where the cuts of some dimension don't line up.
LayoutPtr try_to_layout(const Sizes& mesh_sizes, const Placements& placements,
                        std::span<const std::int64_t> sizes) {
  auto parts = take_apart(placements, sizes.size());
  Layout::Dims dims(sizes.size());
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    auto digits = to_digits(mesh_sizes, parts.cuts[d], sizes[d]);
    if (!digits) return nullptr;
    dims[d] = std::move(*digits);
  }
  return Layout::intern(mesh_sizes, std::move(dims), std::move(parts.partial));
}

}  // namespace

LayoutPtr to_layout(const Sizes& mesh_sizes, const Placements& placements,
                    std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(placements.size() == mesh_sizes.size(), "placements ", to_string(placements),
                " are ", placements.size(), " for a mesh of ", mesh_sizes.size(),
                " dimensions; give one a mesh dimension");
  auto layout = try_to_layout(mesh_sizes, placements, sizes);
  TESSERA_CHECK(layout, "placements ", to_string(placements),
                " cut a tensor dimension at places that don't line up; use split factors that "
                "divide the dimension, or Shard");
  return layout;
}

Placements to_placements(const Layout& layout, std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(static_cast<int>(sizes.size()) == layout.tensor_ndim(), "layout ",
                to_string(layout), " was given sizes of ", sizes.size(), " dimensions");
  Placements out;
  for (int m = 0; m < layout.mesh_ndim(); ++m) out.push_back(placement_of(layout, m));
  if (!has_several_digits(layout)) return out;
  const auto back = try_to_layout(layout.mesh_sizes(), out, sizes);
  TESSERA_CHECK(
      back && detail::without_unit_mesh_dims(back) == detail::without_unit_mesh_dims(layout.ptr()),
      "layout ", to_string(layout),
      " has no form as a list of placements: a digit in front is split unevenly");
  return out;
}

}  // namespace tessera

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <shared_mutex>
#include <span>
#include <utility>

#include "layout/digits.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"

namespace tessera::detail {

// The canonical form of a tensor dimension's Digits (sub-dimensions, see Layout). All descriptions
// of one sharding need one form, because Layouts are compared by address.

namespace {

using MeshSizes = std::vector<std::int64_t>;

/// Whether torch.chunk cuts `extent * factor` positions only at multiples of `factor`, exactly as
/// torch.chunk cuts `extent` positions. Chunks may be uneven: 2, 2, 1 and 4, 4, 2.
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
  // torch.chunk makes chunks of at most two nonzero sizes: full chunks, and one shorter chunk.
  const auto rest = mesh_dims.subspan(1);
  return cuts_scale(mesh, chunk, factor, rest) && cuts_scale(mesh, extent % chunk, factor, rest);
}

/// Returns the largest number of positions of a Digit (sub-dimension) that any rank stores.
std::int64_t largest_chunk(const MeshSizes& mesh, const Digit& digit) {
  auto extent = digit.extent;
  for (const int dim : digit.mesh_dims) {
    extent = ceil_div(extent, mesh_size(mesh, dim));
  }
  return extent;
}

/// Whether two neighbouring Digits (sub-dimensions) form one sharded Digit. `minor` must not be
/// sharded, or a rank must have at most one position of `major`. cuts_scale() must be true.
bool is_one_digit(const MeshSizes& mesh, const Digit& major, const Digit& minor) {
  if (major.mesh_dims.empty()) {
    return mesh_product(mesh, minor.mesh_dims) == 1;
  }
  const bool adjoin = minor.mesh_dims.empty() || largest_chunk(mesh, major) == 1;
  return adjoin && cuts_scale(mesh, major.extent, minor.extent, major.mesh_dims);
}

}  // namespace

std::int64_t mesh_product(const MeshSizes& mesh_sizes, const std::vector<int>& mesh_dims) {
  std::int64_t product = 1;
  for (const int dim : mesh_dims) {
    product *= mesh_size(mesh_sizes, dim);
  }
  return product;
}

std::vector<Digit> canonical_digits(const MeshSizes& mesh_sizes, std::vector<Digit> digits) {
  std::vector<Digit> out;
  for (auto& digit : digits) {
    if (digit.extent == 1 && digit.mesh_dims.empty() && digits.size() > 1) {
      continue;
    }
    if (!out.empty() && is_one_digit(mesh_sizes, out.back(), digit)) {
      auto& order = out.back().mesh_dims;
      out.back().extent *= digit.extent;
      order.insert(order.end(), digit.mesh_dims.begin(), digit.mesh_dims.end());
    } else {
      out.push_back(std::move(digit));
    }
  }
  if (out.size() != 1) {
    return out;
  }
  // A single Digit (sub-dimension) is the whole tensor dimension. The Digit's extent is set to 0,
  // so that the layout does not depend on the sizes of tensors.
  if (out.front().mesh_dims.empty()) {
    return {};
  }
  out.front().extent = 0;
  return out;
}

/// Replicates mesh dimensions of size 1, which are common because one configuration serves any
/// number of GPUs. Otherwise redistribution plans would have collectives in groups of one rank.
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

namespace tessera {

// Layouts, and the table that interns them. Every operator on distributed tensors compares and
// hashes layouts. Interning makes equal layouts one object, so only pointers are compared.

/// The data that identify a layout. canonicalise() gives equal layouts equal data.
struct Layout::Content {
  std::vector<std::int64_t> mesh_sizes;
  Layout::Dims dims;
  std::vector<PartialDim> partial;

  friend auto operator<=>(const Content&, const Content&) = default;
  void check() const;
  void canonicalise();
};

namespace {

void check_mesh_dim(std::vector<bool>& used, int dim) {
  TESSERA_CHECK(dim >= 0 && static_cast<std::size_t>(dim) < used.size(),
                "layout uses mesh dimension ", dim, ", but the number of mesh dimensions is ",
                used.size());
  TESSERA_CHECK(!used[static_cast<std::size_t>(dim)], "layout uses mesh dimension ", dim,
                " twice; use each mesh dimension for at most one tensor dimension or partial sum");
  used[static_cast<std::size_t>(dim)] = true;
}

}  // namespace

/// Throws Error for an invalid layout. Must be called before canonical_digits(), which uses mesh
/// dimensions as indices.
void Layout::Content::check() const {
  std::vector<bool> used(mesh_sizes.size(), false);
  for (const auto& digits : dims) {
    for (const auto& digit : digits) {
      TESSERA_CHECK(digits.size() == 1 || digit.extent >= 1, "layout has a digit of extent ",
                    digit.extent, " among several digits; each digit needs an extent of 1 or more");
      for (const int dim : digit.mesh_dims) {
        check_mesh_dim(used, dim);
      }
    }
  }
  for (const auto& pending : partial) {
    check_mesh_dim(used, pending.mesh_dim);
  }
}

void Layout::Content::canonicalise() {
  for (auto& digits : dims) {
    digits = detail::canonical_digits(mesh_sizes, std::move(digits));
  }
  // The order of the partial mesh dimensions has no meaning, because reductions always run from
  // inner to outer mesh dimensions. Sorting makes equal layouts equal lists.
  std::sort(partial.begin(), partial.end(),
            [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
}

class Layout::Table {
 public:
  static Table& instance() {
    // The table of layouts is never destroyed, because static objects can refer to layouts.
    static auto* const table = new Table;
    return *table;
  }

  LayoutPtr find_or_make(const Content& content) {
    // Most look-ups find the layout, so a shared lock is tried first.
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = layouts_.find(content); found != layouts_.end()) {
        return LayoutPtr(found->second.get());
      }
    }
    const std::unique_lock lock(mutex_);
    auto& layout = layouts_[content];
    if (layout == nullptr) {
      layout.reset(new Layout(content));
    }
    return LayoutPtr(layout.get());
  }

 private:
  std::shared_mutex mutex_;
  std::map<Content, std::unique_ptr<const Layout>> layouts_;
};

Layout::Layout(Content content)
    : mesh_sizes_(std::move(content.mesh_sizes)),
      dims_(std::move(content.dims)),
      partial_(std::move(content.partial)),
      sharded_dim_(mesh_sizes_.size(), -1),
      replicated_(partial_.empty()) {
  for (int d = 0; d < tensor_ndim(); ++d) {
    for (const int m : mesh_dims_of(d)) {
      sharded_dim_[static_cast<std::size_t>(m)] = d;
      replicated_ = false;
    }
  }
}

LayoutPtr Layout::intern(std::vector<std::int64_t> mesh_sizes, Dims dims,
                         std::vector<PartialDim> partial) {
  Content content{std::move(mesh_sizes), std::move(dims), std::move(partial)};
  content.check();
  content.canonicalise();
  return Table::instance().find_or_make(content);
}

LayoutPtr Layout::replicated(std::vector<std::int64_t> mesh_sizes, int tensor_ndim) {
  return intern(std::move(mesh_sizes), Dims(static_cast<std::size_t>(tensor_ndim)));
}

const PartialDim* Layout::partial_on(int mesh_dim) const {
  const auto found = std::find_if(partial_.begin(), partial_.end(),
                                  [&](const auto& p) { return p.mesh_dim == mesh_dim; });
  return found == partial_.end() ? nullptr : &*found;
}

std::vector<int> Layout::mesh_dims_of(int tensor_dim) const {
  std::vector<int> out;
  for (const auto& digit : digits(tensor_dim)) {
    out.insert(out.end(), digit.mesh_dims.begin(), digit.mesh_dims.end());
  }
  return out;
}

namespace {

/// Returns a Digit (sub-dimension) as text. `alone`: whether the tensor dimension has no other
/// Digit; if true, the text omits the extent.
std::string to_string(const Digit& digit, bool alone) {
  std::string out;
  for (const int dim : digit.mesh_dims) {
    out += (out.empty() ? "m" : ",m") + std::to_string(dim);
  }
  if (alone) {
    return out;
  }
  return std::to_string(digit.extent) + (out.empty() ? "" : ":" + out);
}

std::string to_string(const std::vector<Digit>& digits) {
  std::string out;
  for (const auto& digit : digits) {
    out += (out.empty() ? "" : " x ") + to_string(digit, digits.size() == 1);
  }
  return out.empty() ? "-" : out;
}

}  // namespace

std::string to_string(const Layout& layout) {
  std::string out = "[";
  for (int d = 0; d < layout.tensor_ndim(); ++d) {
    out += (d == 0 ? "" : " | ") + to_string(layout.digits(d));
  }
  out += ']';
  if (!layout.is_partial()) {
    return out;
  }
  std::string terms;
  for (const auto& [dim, op] : layout.partial()) {
    terms += (terms.empty() ? "m" : ", m") + std::to_string(dim) + ":" + to_string(op);
  }
  return out + " partial{" + terms + "}";
}

std::ostream& operator<<(std::ostream& stream, const Layout& layout) {
  return stream << to_string(layout);
}

std::ostream& operator<<(std::ostream& stream, const LayoutPtr& layout) {
  return layout ? stream << *layout : stream << "no layout";
}

}  // namespace tessera

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <ostream>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <utility>

#include "layout/digits.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"

namespace tessera::detail {

// The canonical form of the Digits of a tensor dimension (see Layout). Layouts are interned by
// content, so two descriptions of the same division must become one. Otherwise equal layouts would
// be different objects, and would be redistributed into each other.

namespace {

using MeshSizes = std::vector<std::int64_t>;

/// Whether torch.chunk divides `extent * factor` positions over `mesh_dims` at the same boundaries
/// as `extent` blocks of `factor` positions. If so, an undivided Digit (sub-dimension) of `factor`
/// positions can be merged with the Digit of `extent` positions before it. Divisibility is not
/// needed, because uneven chunks may scale as well: 5 over 3 ranks gives 2, 2 and 1, and 10 over 3
/// ranks gives 4, 4 and 2.
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
  // torch.chunk makes chunks of at most two nonzero sizes: full chunks, and one remainder.
  const auto rest = mesh_dims.subspan(1);
  return cuts_scale(mesh, chunk, factor, rest) && cuts_scale(mesh, extent % chunk, factor, rest);
}

/// Returns the number of positions of the Digit (sub-dimension) on the rank that has the most.
std::int64_t largest_chunk(const MeshSizes& mesh, const Digit& digit) {
  auto extent = digit.extent;
  for (const int dim : digit.mesh_dims) {
    extent = ceil_div(extent, mesh_size(mesh, dim));
  }
  return extent;
}

/// Whether two sub-dimensions (Digit) can be merged into one over the mesh dimensions of both. In
/// one case `minor` is not divided. In the other case the chunks of `major` are single positions,
/// so the mesh dimensions of `minor` divide further.
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
    // A digit of a single, undivided position is needed only if a dimension has no other digit.
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
  // A single Digit (sub-dimension) is the whole dimension, so its extent is set to 0. The layout
  // then does not depend on sizes.
  if (out.front().mesh_dims.empty()) {
    return {};
  }
  out.front().extent = 0;
  return out;
}

/// Meshes with dimensions of size 1 are common, because one configuration serves any number of
/// GPUs. Without this function, redistribution plans would have collectives in groups of one rank.
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
// hashes layouts. Interning makes this cheap, because pointers can be compared instead.

/// The data that identify a layout. check() must be called before the canonical form is computed,
/// which uses mesh dimensions as indices.
struct Layout::Content {
  std::vector<std::int64_t> mesh_sizes;
  Layout::Dims dims;
  std::vector<PartialDim> partial;

  std::uint64_t hash() const;
  void check() const;
  void canonicalise();
};

namespace {

/// Hashes 64-bit words by multiplication with 2^64 / golden ratio (Knuth's multiplicative hashing).
class Hasher {
 public:
  void add(std::uint64_t value) {
    state_ = (state_ ^ value) * 0x9E3779B97F4A7C15ULL;
    state_ ^= state_ >> 29;
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3ULL;  // arbitrary odd value: digits of pi
};

/// Marks mesh dimension `dim` in `used`. Throws Error if `dim` is out of range or already marked.
void check_mesh_dim(std::vector<bool>& used, int dim) {
  TESSERA_CHECK(dim >= 0 && static_cast<std::size_t>(dim) < used.size(),
                "layout uses mesh dimension ", dim, " of a mesh with ", used.size());
  TESSERA_CHECK(!used[static_cast<std::size_t>(dim)], "layout uses mesh dimension ", dim,
                " twice; a mesh dimension splits one tensor dimension, or is partial, or neither");
  used[static_cast<std::size_t>(dim)] = true;
}

/// Whether `digits` may not be in canonical form (see Layout); most layouts already are.
bool needs_canonical(const std::vector<Digit>& digits) {
  return digits.size() > 1 ||
         (digits.size() == 1 && (digits[0].extent != 0 || digits[0].mesh_dims.empty()));
}

}  // namespace

/// The hash includes the number of Digits (sub-dimensions) of each tensor dimension, so that moving
/// a Digit to the neighbouring tensor dimension changes the hash.
std::uint64_t Layout::Content::hash() const {
  Hasher hasher;
  for (const auto size : mesh_sizes) {
    hasher.add(static_cast<std::uint64_t>(size));
  }
  for (const auto& digits : dims) {
    hasher.add(digits.size() + 101);
    for (const auto& digit : digits) {
      hasher.add(static_cast<std::uint64_t>(digit.extent) << 8 | digit.mesh_dims.size());
      for (const int dim : digit.mesh_dims) {
        hasher.add(static_cast<std::uint64_t>(dim));
      }
    }
  }
  for (const auto& [dim, op] : partial) {
    hasher.add(static_cast<std::uint64_t>(dim) << 8 | static_cast<std::uint64_t>(op));
  }
  return hasher.value();
}

/// Throws Error for invalid content. Must be called before canonical_digits(), which uses mesh
/// dimensions as indices.
void Layout::Content::check() const {
  std::vector<bool> used(mesh_sizes.size(), false);
  for (const auto& digits : dims) {
    for (const auto& digit : digits) {
      TESSERA_CHECK(digits.size() == 1 || digit.extent >= 1, "layout has a digit of extent ",
                    digit.extent, " beside others; each of several digits needs its extent");
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
    if (!needs_canonical(digits)) {
      continue;
    }
    digits = detail::canonical_digits(mesh_sizes, std::move(digits));
  }
  // The order of `partial` has no meaning, because reductions always run from inner mesh dimensions
  // to outer ones; so equal layouts get the same order.
  std::sort(partial.begin(), partial.end(),
            [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
}

/// The table of all layouts, in buckets by hash. Each bucket has its own lock.
class Layout::Table {
 public:
  static Table& instance() {
    // The table is never destroyed, because static objects may have layouts.
    static auto* const table = new Table;
    return *table;
  }

  LayoutPtr find_or_make(Content content) {
    // Nearly every call finds its layout under the shared lock. Otherwise the bucket is searched
    // again under the exclusive lock, because another thread may have inserted the layout.
    const auto hash = content.hash();
    auto& bucket = bucket_of(hash);
    {
      const std::shared_lock lock(bucket.mutex);
      if (auto found = bucket.find(hash, content)) {
        return found;
      }
    }
    const std::unique_lock lock(bucket.mutex);
    if (auto found = bucket.find(hash, content)) {
      return found;
    }
    const auto* made = new Layout(std::move(content), hash);
    bucket.layouts.emplace(hash, std::unique_ptr<const Layout>(made));
    return LayoutPtr(made);
  }

  /// Drops a reference to a layout, and frees the layout if it was the last one. The lock is held,
  /// so that no thread can find the layout after its count has reached 0 and before it is removed.
  void release(const Layout* layout) {
    // The hash is read before the layout is erased, because erasing destroys the layout.
    auto& bucket = bucket_of(layout->hash_);
    const std::unique_lock lock(bucket.mutex);
    // acq_rel: accesses by threads that have dropped their references happen before the
    // destruction.
    if (layout->holders_.fetch_sub(1, std::memory_order_acq_rel) > 1) {
      return;
    }
    const auto [begin, end] = bucket.layouts.equal_range(layout->hash_);
    bucket.layouts.erase(
        std::find_if(begin, end, [&](const auto& entry) { return entry.second.get() == layout; }));
  }

  std::size_t count() {
    std::size_t sum = 0;
    for (auto& bucket : buckets_) {
      const std::shared_lock lock(bucket.mutex);
      sum += bucket.layouts.size();
    }
    return sum;
  }

 private:
  struct Bucket {
    // Returns the layout with this content, or nullptr. The caller holds the bucket's lock, so that
    // the layout cannot be freed before the returned reference exists.
    LayoutPtr find(std::uint64_t hash, const Content& content) const {
      const auto [begin, end] = layouts.equal_range(hash);
      for (auto entry = begin; entry != end; ++entry) {
        const auto& layout = *entry->second;
        const bool same = layout.dims_ == content.dims && layout.partial_ == content.partial &&
                          layout.mesh_sizes_ == content.mesh_sizes;
        if (same) {
          return LayoutPtr(&layout);
        }
      }
      return nullptr;
    }

    // The lock of `layouts`, a multimap by hash, because different layouts may have equal hashes.
    mutable std::shared_mutex mutex;
    std::unordered_multimap<std::uint64_t, std::unique_ptr<const Layout>> layouts;
  };

  // Selects one of 16 buckets by the top four bits of the hash, which multiplication mixes best.
  Bucket& bucket_of(std::uint64_t hash) { return buckets_[hash >> 60]; }

  std::array<Bucket, 16> buckets_;
};

Layout::Layout(Content content, std::uint64_t hash)
    : mesh_sizes_(std::move(content.mesh_sizes)),
      dims_(std::move(content.dims)),
      partial_(std::move(content.partial)),
      sharded_dim_(mesh_sizes_.size(), -1),
      replicated_(partial_.empty()),
      sized_(std::any_of(dims_.begin(), dims_.end(),
                         [](const auto& digits) { return digits.size() > 1; })),
      hash_(hash) {
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
  return Table::instance().find_or_make(std::move(content));
}

// Drops a reference to a layout. Takes the lock of the table's bucket only for the last reference.
void Layout::release(const Layout* layout) {
  auto holders = layout->holders_.load(std::memory_order_relaxed);
  while (holders > 1) {
    if (layout->holders_.compare_exchange_weak(holders, holders - 1, std::memory_order_release,
                                               std::memory_order_relaxed)) {
      return;
    }
  }
  Table::instance().release(layout);
}

std::size_t Layout::count() {
  return Table::instance().count();
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

/// Returns a Digit (sub-dimension) as text. `alone`: whether it is the only Digit of its tensor
/// dimension; its extent is then omitted.
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

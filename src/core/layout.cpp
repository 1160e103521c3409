#include "tessera/core/layout.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "canonical_digits.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// What identifies a layout, in canonical form.
struct Content {
  std::vector<std::int64_t> mesh_sizes;
  Layout::Dims dims;
  std::vector<PartialDim> partial;
};

class Hasher {
 public:
  void add(std::uint64_t value) {
    state_ = (state_ ^ value) * 0x9E3779B97F4A7C15ULL;
    state_ ^= state_ >> 29;
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3ULL;
};

std::uint64_t hash(const Content& content) {
  Hasher hasher;
  for (const auto size : content.mesh_sizes) hasher.add(static_cast<std::uint64_t>(size));
  for (const auto& digits : content.dims) {
    hasher.add(digits.size() + 101);
    for (const auto& digit : digits) {
      hasher.add(static_cast<std::uint64_t>(digit.extent) << 8 | digit.mesh_dims.size());
      for (const int dim : digit.mesh_dims) hasher.add(static_cast<std::uint64_t>(dim));
    }
  }
  for (const auto& [dim, op] : content.partial) {
    hasher.add(static_cast<std::uint64_t>(dim) << 8 | static_cast<std::uint64_t>(op));
  }
  return hasher.value();
}

bool same(const Layout& layout, const Content& content) {
  return layout.dims() == content.dims && layout.partial() == content.partial &&
         layout.mesh_sizes() == content.mesh_sizes;
}

/// The set of all layouts, in shards so that threads seldom meet.
class Table {
 public:
  template <class Make>
  LayoutPtr find_or_make(Content content, const Make& make) {
    const auto key = hash(content);
    auto& shard = shards_[key >> 60];
    {
      const std::shared_lock lock(shard.mutex);
      if (const auto found = shard.find(key, content)) return found;
    }
    const std::unique_lock lock(shard.mutex);
    if (const auto found = shard.find(key, content)) return found;
    return shard.layouts.emplace(key, make(std::move(content)))->second.get();
  }

 private:
  struct Shard {
    LayoutPtr find(std::uint64_t key, const Content& content) const {
      const auto [begin, end] = layouts.equal_range(key);
      const auto found =
          std::find_if(begin, end, [&](const auto& entry) { return same(*entry.second, content); });
      return found == end ? nullptr : found->second.get();
    }

    mutable std::shared_mutex mutex;
    std::unordered_multimap<std::uint64_t, std::unique_ptr<const Layout>> layouts;
  };

  std::array<Shard, 16> shards_;
};

Table& table() {
  static auto* const instance = new Table;  // never destroyed: layouts outlive every static
  return *instance;
}

void check_mesh_dim(std::vector<bool>& used, int dim) {
  TESSERA_CHECK(dim >= 0 && static_cast<std::size_t>(dim) < used.size(),
                "layout uses mesh dimension ", dim, " of a mesh with ", used.size());
  TESSERA_CHECK(!used[static_cast<std::size_t>(dim)], "layout uses mesh dimension ", dim,
                " twice; a mesh dimension splits one tensor dimension, or is partial, or neither");
  used[static_cast<std::size_t>(dim)] = true;
}

void check(const Content& content) {
  std::vector<bool> used(content.mesh_sizes.size(), false);
  for (const auto& digits : content.dims) {
    for (const auto& digit : digits) {
      TESSERA_CHECK(digits.size() == 1 || digit.extent >= 1, "layout has a digit of extent ",
                    digit.extent, " beside others; each of several digits needs its extent");
      for (const int dim : digit.mesh_dims) check_mesh_dim(used, dim);
    }
  }
  for (const auto& partial : content.partial) check_mesh_dim(used, partial.mesh_dim);
}

bool needs_canonical(const std::vector<Digit>& digits) {
  return digits.size() > 1 ||
         (digits.size() == 1 && (digits[0].extent != 0 || digits[0].mesh_dims.empty()));
}

void canonicalise(Content& content) {
  for (auto& digits : content.dims) {
    if (!needs_canonical(digits)) continue;
    digits = detail::canonical_digits(content.mesh_sizes, std::move(digits));
  }
  std::sort(content.partial.begin(), content.partial.end(),
            [](const auto& a, const auto& b) { return a.mesh_dim < b.mesh_dim; });
}

}  // namespace

Layout::Layout(std::vector<std::int64_t> mesh_sizes, Dims dims, std::vector<PartialDim> partial)
    : mesh_sizes_(std::move(mesh_sizes)),
      dims_(std::move(dims)),
      partial_(std::move(partial)),
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
  check(content);
  canonicalise(content);
  return table().find_or_make(std::move(content), [](Content made) {
    return std::unique_ptr<const Layout>(
        new Layout(std::move(made.mesh_sizes), std::move(made.dims), std::move(made.partial)));
  });
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

std::string to_string(const Digit& digit, bool alone) {
  std::string out;
  for (const int dim : digit.mesh_dims) out += (out.empty() ? "m" : ",m") + std::to_string(dim);
  if (alone) return out;
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
  out += "]";
  if (!layout.is_partial()) return out;
  std::string terms;
  for (const auto& [dim, op] : layout.partial()) {
    terms += (terms.empty() ? "m" : ", m") + std::to_string(dim) + ":" + to_string(op);
  }
  return out + " partial{" + terms + "}";
}

}  // namespace tessera

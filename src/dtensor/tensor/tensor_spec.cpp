#include <fmt/format.h>
#include <fmt/ranges.h>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <functional>
#include <mutex>
#include <numeric>
#include <ostream>
#include <set>
#include <unordered_map>
#include <utility>

#include "tensor/distributed_impl.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/sharding_spec.h"

namespace tessera::detail {

// The table of interned specs, and the arithmetic of strides and sizes. Interning costs a hash and
// a lock when a spec is made; later comparisons, above all of call keys, only compare addresses.

namespace {

/// Hashes addresses, because layouts are interned and a mesh is identified by its address.
std::size_t hash_of(const TensorSpec& spec) {
  std::size_t hash = std::hash<LayoutPtr>{}(spec.sharding.layout);
  auto mix = [&hash](std::size_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ull; };
  mix(std::hash<const void*>{}(spec.sharding.mesh.id()));
  mix(static_cast<std::size_t>(spec.dtype));
  for (auto size : spec.sizes) {
    mix(static_cast<std::size_t>(size));
  }
  for (auto stride : spec.strides) {
    mix(static_cast<std::size_t>(stride));
  }
  return hash;
}

/// The table of all specs, for all threads: ranks may be threads, and threads of one rank share
/// tensors. A spec is freed with the last tensor or cached plan that uses it.
class SpecTable {
 public:
  static SpecTable& instance() {
    // Never destroyed, because tensors with static storage may outlive the table.
    static auto* table = new SpecTable;
    return *table;
  }

  TensorSpecPtr intern(TensorSpec&& spec) {
    const auto hash = hash_of(spec);
    // Unused specs are released after the lock, because their deleter takes the lock.
    std::vector<TensorSpecPtr> others;
    std::lock_guard lock(mutex_);
    auto [begin, end] = specs_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      auto known = it->second.reference.lock();
      if (known && *known == spec) {
        return known;
      }
      others.push_back(std::move(known));
    }
    // Computed only for a new spec; specs that are in the table already have their geometry.
    spec.geometry = {shape_geometry(spec.sizes, spec.strides)};
    const auto* raw = new TensorSpec(std::move(spec));
    TensorSpecPtr made(raw, [hash](const TensorSpec* p) { instance().erase(hash, p); });
    specs_.emplace(hash, Entry{raw, made});
    return made;
  }

 private:
  // erase() identifies an entry by its address: the weak reference has expired by then, and an
  // equal spec with the same hash may have been made since.
  struct Entry {
    const TensorSpec* address;
    std::weak_ptr<const TensorSpec> reference;
  };

  void erase(std::size_t hash, const TensorSpec* spec) {
    {
      std::lock_guard lock(mutex_);
      auto [begin, end] = specs_.equal_range(hash);
      auto it = std::find_if(begin, end, [&](auto& e) { return e.second.address == spec; });
      if (it != end) {
        specs_.erase(it);
      }
    }
    delete spec;
  }

  std::mutex mutex_;
  std::unordered_multimap<std::size_t, Entry> specs_;
};

/// The set of the numbers of positions of a digit (factor of a dimension) that ranks have.
std::set<std::int64_t> part_sizes(const Layout& layout, const Digit& digit, std::int64_t size) {
  std::set<std::int64_t> parts{digit.extent == 0 ? size : digit.extent};
  for (const int mesh_dim : digit.mesh_dims) {
    const auto count = layout.mesh_sizes()[static_cast<std::size_t>(mesh_dim)];
    for (const auto extent : std::exchange(parts, {})) {
      // torch.chunk makes full chunks, then at most one shorter chunk, then empty chunks.
      const auto full = chunk_size(extent, count, 0);
      parts.insert({full, chunk_size(extent, count, count - 1)});
      if (full > 0 && extent / full < count) {
        parts.insert(chunk_size(extent, count, extent / full));
      }
    }
  }
  return parts;
}

std::set<std::int64_t> part_sizes(const Layout& layout, int dim, std::int64_t size) {
  std::set<std::int64_t> sizes{1};
  for (const auto& digit : layout.digits(dim)) {
    for (const auto major : std::exchange(sizes, {})) {
      for (const auto minor : part_sizes(layout, digit, size)) {
        sizes.insert(major * minor);
      }
    }
  }
  return sizes;
}

}  // namespace

TensorSpecPtr intern_spec(TensorSpec spec) {
  return SpecTable::instance().intern(std::move(spec));
}

std::vector<std::int64_t> local_sizes(const ShardingSpec& sharding, c10::IntArrayRef sizes) {
  const auto& coordinate = sharding.mesh.coordinate();
  TESSERA_CHECK(sharding.mesh.contains_this_rank(), "this rank is not in ",
                to_string(sharding.mesh), " and holds no part of its tensors");
  return tessera::local_sizes(*sharding.layout, sizes, coordinate);
}

// A stable sort, so that dimensions with equal strides have one order on all ranks.
std::vector<std::int64_t> strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return like[a] > like[b]; });
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (const std::size_t dim : order | ranges::views::reverse) {
    strides[dim] = like[dim] == 0 && sizes[dim] > 1 ? 0 : stride;
    if (strides[dim] != 0) {
      stride *= std::max<std::int64_t>(sizes[dim], 1);
    }
  }
  return strides;
}

// A dimension that is not split has one size on all ranks. A dimension that is split into equal
// parts, or into parts with at least two positions each, is ordered in the same way on all ranks.
bool shards_agree_on_stride_order(const Layout& layout, c10::IntArrayRef sizes) {
  for (const auto& [dim, size] : ranges::views::enumerate(sizes)) {
    const auto index = static_cast<int>(dim);
    if (layout.digits(index).empty()) {
      continue;
    }
    const auto parts = part_sizes(layout, index, size);
    if (parts.size() > 1 && *parts.begin() <= 1) {
      return false;
    }
  }
  return true;
}

std::vector<std::int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (auto&& [own, size] : ranges::views::zip(strides, sizes) | ranges::views::reverse) {
    own = stride;
    stride *= std::max<std::int64_t>(size, 1);
  }
  return strides;
}

std::vector<std::int64_t> global_strides(c10::IntArrayRef sizes, c10::IntArrayRef local_strides,
                                         bool agreed) {
  return agreed ? strides_in_order_of(sizes, local_strides) : detail::contiguous_strides(sizes);
}

LayoutPtr gradient_layout(LayoutPtr layout) {
  if (!layout->is_partial()) {
    return layout;
  }
  return Layout::intern(layout->mesh_sizes(), layout->dims());
}

bool is_reducible(c10::ScalarType type, ReduceOp op) {
  const bool complex = c10::isComplexType(type);
  if (op == ReduceOp::kSum) {
    return type != c10::ScalarType::Bool;
  }
  if (op == ReduceOp::kAvg) {
    return complex || c10::isFloatingType(type);
  }
  return !complex;
}

void check_partials(const Layout& layout, c10::ScalarType type, std::string_view asked) {
  for (const auto& partial : layout.partial()) {
    TESSERA_CHECK(is_reducible(type, partial.op), asked, ": Partial(", to_string(partial.op),
                  ") of ", c10::toString(type),
                  " has no meaning: bool has max, min and product, integers all but avg, complex "
                  "numbers sum and avg; choose one of these, or convert");
  }
}

std::string describe(const Layout& layout, c10::IntArrayRef sizes) {
  try {
    return to_string(to_placements(layout, sizes));
  } catch (const Error&) {
    return to_string(layout);
  }
}

std::string describe(const TensorSpec& spec) {
  return fmt::format("[{}] on {} as {}", fmt::join(spec.sizes, ", "),
                     to_string(spec.sharding.mesh.shape()),
                     describe(*spec.sharding.layout, spec.sizes));
}

}  // namespace tessera::detail

namespace tessera {

std::ostream& operator<<(std::ostream& stream, const ShardingSpec& spec) {
  return stream << spec.mesh << ", " << spec.layout;
}

bool detail::IsDistributed::operator()(const at::Tensor& tensor) const {
  return tensor.defined() && detail::as_distributed(tensor) != nullptr;
}

const ShardingSpec& sharding_spec(const at::Tensor& tensor) {
  return detail::impl_of_distributed(tensor).spec()->sharding;
}

const at::Tensor& local_tensor(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? detail::as_distributed(tensor) : nullptr;
  if (impl == nullptr) {
    return tensor;
  }
  detail::check_readable(*impl, "local_tensor()");
  return impl->local();
}

/// Makes a distributed tensor without a comparison between ranks, which must have agreed on the
/// sizes already.
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes) {
  detail::check_local(local, spec, sizes);
  return detail::wrap_local(detail::dense_local(local.detach(), spec, sizes), spec, sizes);
}

}  // namespace tessera

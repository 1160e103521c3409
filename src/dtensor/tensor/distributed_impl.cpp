#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <ostream>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "rank/rank.h"
#include "tensor/distributed_impl.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// libtorch answers most queries from fields of TensorImpl, so the constructor copies sizes and
// strides from the TensorSpec. Each result of an operator runs the constructor.

namespace {

std::string fqn_of(DistributedTensorImpl& impl) {
  return parameter_name(tensor_of(impl));
}

std::string name_of(DistributedTensorImpl& impl) {
  const std::string name = fqn_of(impl);
  return name.empty() ? "a parameter " : "parameter '" + name + "' ";
}

std::string running_backward() {
  const std::string node = running_node();
  return node.empty() ? "" : " in the backward of " + node;
}

std::string without_memory(DistributedTensorImpl& impl) {
  const std::string fqn = fqn_of(impl);
  return concat("the memory of a distributed tensor was accessed", running_backward(),
                ", but a distributed tensor has no memory (", fqn.empty() ? "" : "'" + fqn + "', ",
                describe(*impl.spec()),
                "); use to_local() or full_tensor(), or run code that needs memory, as a "
                "torch::autograd::Function may, in local_map; print tessera::DistributedTensor(x) "
                "or tessera::to_string(x)");
}

}  // namespace

DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec)
    : TensorWrapper(local, spec->dtype), local_(std::move(local)), spec_(std::move(spec)) {
  replay_views();
  adopt_sizes();
  count_with(local_);
}

DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec,
                                             const c10::Storage& storage)
    : TensorWrapper(local, spec->dtype, storage), local_(std::move(local)), spec_(std::move(spec)) {
  adopt_sizes();
}

DistributedTensorImpl::DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in,
                                             TensorSpecPtr spec)
    : DistributedTensorImpl(std::move(stand_in), std::move(spec)) {
  local_ = at::Tensor();
  transfer_ = std::move(transfer);
}

/// Sets local_ to the result of the transfer; local_ then shares this tensor's version counter. If
/// finish() throws, transfer_ stays set, so that each later use throws as well.
void DistributedTensorImpl::wait_for_transfer() const {
  local_ = transfer_->finish();
  give_count_to(local_);
  transfer_.reset();
}

void DistributedTensorImpl::adopt_sizes() {
  set_shape(spec_->sizes, spec_->strides, spec_->geometry);
}

void DistributedTensorImpl::replace(at::Tensor local, TensorSpecPtr spec) {
  local_ = std::move(local);
  transfer_.reset();
  spec_ = std::move(spec);
  adopt_sizes();
}

c10::intrusive_ptr<TensorWrapper> DistributedTensorImpl::copy() const {
  auto result = c10::make_intrusive<DistributedTensorImpl>(local(), spec_);
  result->detached_view_ = detached_view_;
  return result;
}

void DistributedTensorImpl::assign(const TensorWrapper* other) {
  const auto* from = dynamic_cast<const DistributedTensorImpl*>(other);
  TESSERA_CHECK(from != nullptr,
                "set_data of a distributed tensor was passed a plain tensor; distribute the plain "
                "tensor first");
  // set_data must not change a parameter's layout, because optimizers and FSDP rely on the layout.
  TESSERA_CHECK(!requires_grad() || (from->sizes_default() == sizes_default() &&
                                     from->spec_->sharding == spec_->sharding),
                "set_data of ", name_of(*this), "of sizes ", sizes_default(), " and laid out as ",
                to_string(*spec_->sharding.layout), " needs a tensor of these sizes and layout, ",
                "found ", from->sizes_default(), " and ", to_string(*from->spec_->sharding.layout),
                "; copy the values with copy_() under a NoGradGuard");
  replace(from->local(), from->spec_);
  take_kind_of(*from);  // dtype or device may differ: Module::to() calls set_data
  detached_view_ = from->detached_view_;
}

/// libtorch calls release_resources() when a tensor has only weak references left.
void DistributedTensorImpl::release_resources() {
  local_.reset();
  transfer_.reset();
  detached_view_.reset();
  TensorWrapper::release_resources();
}

// Returns false, and sets the message of the error for a later access to the storage. Setting the
// message in the constructor would slow down every tensor's creation.
bool DistributedTensorImpl::has_storage() const {
  // const_cast, because has_storage() is const in the base class. Setting the error message does
  // not change the elements of the tensor.
  auto* self = const_cast<DistributedTensorImpl*>(this);
  std::string message = without_memory(*self);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  self->set_memory_error(std::move(message));
  return false;
}

const char* DistributedTensorImpl::tensorimpl_type_name() const {
  return "a tessera::DistributedTensor (take to_local() or full_tensor() first)";
}

at::Tensor wrap(at::Tensor local, TensorSpecPtr spec) {
  replay_views();  // set again here: guards of libtorch reset this thread-local setting
  const bool ordinary = !local.is_inference();
  if (const auto& storage = storage_of(local); storage && ordinary) [[likely]] {
    return at::Tensor(
        c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec), storage));
  }
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec)));
}

// The constructor of TensorImpl needs dispatch keys and a device. An empty tensor provides both,
// because the local tensor does not exist yet.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec) {
  BelowAutograd guard;
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(
      std::move(transfer), at::empty({0}, like.options()), std::move(spec)));
}

// DetachedView: a view with its own copy of the elements of a gathered base. Reading the view
// throws if the base was written. views/views.cpp repeats view writes on the base.

namespace {

std::optional<std::uint32_t> version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    return std::nullopt;
  }
  return writes_of(tensor);
}

}  // namespace

bool DetachedView::is_stale() const {
  if (!seen->version) {
    return false;
  }
  // note_write() records the base's version. A later increment by the write itself is valid,
  // because the view and the base can share a version counter.
  const auto now = version_of(base);
  return now != seen->version && !(seen->written && now == *seen->version + 1);
}

void DetachedView::note_write() {
  *seen = {version_of(base), /*written=*/true};
}

DetachedViewPtr detached_view_of(const at::Tensor& base) {
  return std::make_shared<DetachedView>(DetachedView{
      .base = base,
      .seen = std::make_shared<DetachedView::Seen>(DetachedView::Seen{version_of(base)})});
}

void check_readable(const DistributedTensorImpl& impl, std::string_view what) {
  TESSERA_CHECK(!impl.detached_view() || !impl.detached_view()->is_stale(), what,
                " uses a gathered view after the viewed tensor was written; take the view again");
}

const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, but the tensor is undefined");
  const auto* impl = as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, not a plain tensor of sizes ",
                tensor.sizes(), "; convert it with from_local or distribute_tensor");
  return *impl;
}

void check_plain(const at::Tensor& local) {
  TESSERA_CHECK(local.defined(),
                "from_local: the tensor is undefined; pass this rank's shard, with 0 rows if the "
                "shard is empty");
  TESSERA_CHECK(
      !tessera::is_distributed(local),
      "from_local: the tensor is distributed already; change the placements with redistribute()");
}

void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  check_plain(local);
  check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " must pass the shard ", c10::IntArrayRef(expected),
                " of a tensor of ", c10::IntArrayRef(sizes), " as ", describe(*spec.layout, sizes),
                ", but passed ", local.sizes(), "; for uneven shards also pass the global sizes");
}

at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  return !local.is_non_overlapping_and_dense() || (!agreed && !local.is_contiguous())
             ? local.contiguous()
             : local;
}

at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  auto strides = global_strides(sizes, local.strides(), agreed);
  return wrap(alias_tensor(local),
              intern_spec({sharding, sizes.vec(), std::move(strides), local.scalar_type()}));
}

void name_parameter(const at::Tensor& tensor, const std::string& fqn) {
  if (tensor.defined() && tensor.name() != fqn) {
    set_name(tensor, fqn);
  }
}

std::string parameter_name(const at::Tensor& tensor) {
  // A view of a parameter, such as the transpose in at::linear, has the name of the parameter.
  return tensor.name().empty() && tensor.is_view() ? tensor._base().name() : tensor.name();
}

// The table of interned specs, and functions for strides and sizes. Interned specs are compared by
// address, above all in cache keys.

namespace {

/// Hashes addresses: layouts are interned, and a mesh is identified by its address.
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

/// All interned specs of the process; ranks that are threads share the specs. A spec is freed when
/// no tensor and no call plan uses the spec.
class SpecTable {
 public:
  static SpecTable& instance() {
    // The table of specs is never destroyed, because tensors with static storage may outlive it.
    static auto* table = new SpecTable;
    return *table;
  }

  TensorSpecPtr intern(TensorSpec&& spec) {
    const auto hash = hash_of(spec);
    // `others` must be destroyed after `lock`, because the deleter of a spec locks the mutex.
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
    spec.geometry = {shape_geometry(spec.sizes, spec.strides)};
    const auto* raw = new TensorSpec(std::move(spec));
    TensorSpecPtr made(raw, [hash](const TensorSpec* p) { instance().erase(hash, p); });
    specs_.emplace(hash, Entry{raw, made});
    return made;
  }

 private:
  // erase() finds an entry by `address`, because `reference` has expired when erase() runs. An
  // equal spec can already have been added at another address.
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
                to_string(sharding.mesh), " and has no shards of the tensors on this mesh");
  return tessera::local_sizes(*sharding.layout, sizes, coordinate);
}

// A stable sort, so that dimensions with equal strides have the same order on all ranks.
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

// Whether strides have the same order on all ranks. A dimension of local size 0 or 1 can have any
// stride, so all shards need equal sizes or sizes of at least 2.
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
                  ") is not defined for ", c10::toString(type),
                  " tensors; use max, min or product for bool, all but avg for integers, "
                  "sum or avg for complex numbers, or convert the tensor");
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

at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes) {
  detail::check_local(local, spec, sizes);
  return detail::wrap_local(detail::dense_local(local.detach(), spec, sizes), spec, sizes);
}

}  // namespace tessera

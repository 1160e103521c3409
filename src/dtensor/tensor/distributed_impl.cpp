#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

#include "rank/rank.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// The wrapper as seen by libtorch. libtorch's TensorImpl answers most queries from its own fields,
// so the constructor copies the spec's data into these fields. The constructor runs for every
// operator result, so it uses the cheap path if possible.

namespace {

std::string fqn_of(DistributedTensorImpl& impl) {
  return parameter_name(tensor_of(impl));
}

/// The parameter's name for messages: "parameter 'a.weight' ", or "a parameter " if it has no name.
std::string name_of(DistributedTensorImpl& impl) {
  const std::string name = fqn_of(impl);
  return name.empty() ? "a parameter " : "parameter '" + name + "' ";
}

/// The text " in the backward of Square" for messages, if the torch::autograd::Function Square runs
/// its backward. Empty in forward.
std::string running_backward() {
  const std::string node = running_node();
  return node.empty() ? "" : " in the backward of " + node;
}

/// The error message for a call of data_ptr(), which a caller makes in order to print or compute.
std::string without_memory(DistributedTensorImpl& impl) {
  const std::string fqn = fqn_of(impl);
  return concat("the memory of a distributed tensor was asked for", running_backward(),
                ", which it lacks (", fqn.empty() ? "" : "'" + fqn + "', ", describe(*impl.spec()),
                "): read that of to_local() or full_tensor(), or call code that computes with "
                "memory, as a torch::autograd::Function may, by local_map; print "
                "tessera::DistributedTensor(x), or tessera::to_string of it");
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

/// While the transfer was pending, the wrapper used the version counter of a stand-in tensor; the
/// result takes over this counter. A transfer that throws is not reset, so that later uses throw as
/// well.
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
                "set_data of a distributed tensor needs a distributed tensor, found a plain one: "
                "distribute it first");
  // A parameter keeps its layout, because optimizers and FSDP refer to the parameter and rely on
  // its layout.
  TESSERA_CHECK(!requires_grad() || (from->sizes_default() == sizes_default() &&
                                     from->spec_->sharding == spec_->sharding),
                "set_data of ", name_of(*this), "of sizes ", sizes_default(), " and laid out as ",
                to_string(*spec_->sharding.layout), " needs a tensor of these sizes and layout, ",
                "found ", from->sizes_default(), " and ", to_string(*from->spec_->sharding.layout),
                "; copy values into it under a NoGradGuard (copy_) instead");
  replace(from->local(), from->spec_);
  take_kind_of(*from);  // dtype and device: a module's to() changes its parameters in this way
  detached_view_ = from->detached_view_;
}

/// Called when the last strong reference is released while a weak reference exists.
void DistributedTensorImpl::release_resources() {
  local_.reset();
  transfer_.reset();
  detached_view_.reset();
  TensorWrapper::release_resources();
}

// Making the message allocates memory, so it is made here, in the call before the error, instead of
// for every wrapper.
bool DistributedTensorImpl::has_storage() const {
  // Needed because the base class declares the function const; the message is not part of the
  // tensor's value.
  auto* self = const_cast<DistributedTensorImpl*>(this);
  std::string message = without_memory(*self);
  // One mutex for all tensors suffices, since has_storage() is rarely called.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  self->set_memory_error(std::move(message));
  return false;
}

const char* DistributedTensorImpl::tensorimpl_type_name() const {
  return "a tessera::DistributedTensor (take to_local() or full_tensor() first)";
}

at::Tensor wrap(at::Tensor local, TensorSpecPtr spec) {
  replay_views();  // for every wrapper, because libtorch's guards restore a thread's keys
  // A view of an ordinary tensor is not an inference tensor, even in inference mode.
  const bool ordinary = !local.is_inference();
  if (const auto& storage = storage_of(local); storage && ordinary) [[likely]] {
    return at::Tensor(
        c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec), storage));
  }
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec)));
}

// The base class reads dispatch keys and device from a tensor, so an empty tensor stands in for the
// pending one.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec) {
  BelowAutograd guard;
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(
      std::move(transfer), at::empty({0}, like.options()), std::move(spec)));
}

// The state of a view that has its own copy because its base had to be gathered, and the check that
// the view is not read after its base was written. execute/arguments_and_results.cpp makes these
// views; views/views.cpp repeats writes to a view on its base.

namespace {

/// The tensor's version; nullopt for an inference tensor, which has no version counter.
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
  // A write through the view also bumps the view's own version. If view and base share a counter,
  // as views of one tensor do, the version is one more than the version that write_through
  // recorded.
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
                " uses a view that had to be gathered, after the viewed tensor was written: "
                "take the view again");
}

DetachedViewPtr view_of_former(const DistributedTensorImpl& impl) {
  auto& view = *impl.detached_view();
  view.seen->version = version_of(view.base);
  auto result = detached_view_of(alias_tensor(impl));
  // The in-place change of sizes bumps both versions, which must not make the views unreadable.
  view.seen->written = result->seen->written = true;
  return result;
}

namespace {

/// Advances `coordinate` to the next one along the mesh dimensions `dims`; false after the last
/// coordinate.
bool advance(std::vector<std::int64_t>& coordinate, const std::set<int>& dims,
             const std::vector<std::int64_t>& mesh_sizes) {
  for (const int dim : dims) {
    const auto at = static_cast<std::size_t>(dim);
    if (++coordinate[at] < mesh_sizes[at]) {
      return true;
    }
    coordinate[at] = 0;
  }
  return false;
}

/// The first coordinate at which parts of the two layouts have different sizes; empty if there is
/// none. Compares only along the mesh dimensions where the layouts shard differently.
std::vector<std::int64_t> coordinate_of_other_parts(const Layout& layout, const Layout& other,
                                                    c10::IntArrayRef sizes) {
  std::vector<std::int64_t> coordinate(layout.mesh_sizes().size(), 0);
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    if (layout.digits(dim) == other.digits(dim)) {
      continue;
    }
    std::set<int> cut;
    for (const Layout* each : {&layout, &other}) {
      std::ranges::copy(each->mesh_dims_of(dim), std::inserter(cut, cut.end()));
    }
    do {
      const std::int64_t size = sizes[static_cast<std::size_t>(dim)];
      if (local_size(layout, dim, size, coordinate) != local_size(other, dim, size, coordinate)) {
        return coordinate;
      }
    } while (advance(coordinate, cut, layout.mesh_sizes()));
  }
  return {};
}

}  // namespace

const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, found an undefined one");
  const auto* impl = as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, found a plain one of sizes ",
                tensor.sizes(), ": wrap it with from_local or distribute_tensor");
  return *impl;
}

void check_plain(const at::Tensor& local) {
  TESSERA_CHECK(local.defined(),
                "from_local of an undefined tensor; pass this rank's part, of 0 rows where it has "
                "none");
  TESSERA_CHECK(!tessera::is_distributed(local),
                "from_local of a tensor that is distributed already: "
                "redistribute() changes its placements");
}

void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  check_plain(local);
  check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " holds ", c10::IntArrayRef(expected), " of a tensor of ",
                c10::IntArrayRef(sizes), " as ", describe(*spec.layout, sizes), ", found ",
                local.sizes(), ": with uneven shards pass the global sizes");
}

void check_gradient_parts(const char* asked, const Layout& layout, const Layout& gradient,
                          c10::IntArrayRef sizes) {
  const std::vector<std::int64_t> other = coordinate_of_other_parts(layout, gradient, sizes);
  TESSERA_CHECK(other.empty(), asked, ": gradients of a ",
                c10::IntArrayRef(local_sizes(layout, sizes, other)), " part cannot be ",
                describe(gradient, sizes), " of ", sizes,
                "; name placements with parts of that size");
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
  // A view without a name has the name of its base, because at::linear uses the transpose of a
  // weight.
  return tensor.name().empty() && tensor.is_view() ? tensor._base().name() : tensor.name();
}

}  // namespace tessera::detail

// The wrapper as libtorch sees it. A TensorImpl answers most questions from its own fields, so
// everything that the spec knows is copied into them when a wrapper is made: that is on the path of
// every operator, hence a constructor that takes the cheap way where it can.

#include "tensor/distributed_impl.h"

#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "rank/below_autograd.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/parameter_name.h"

namespace tessera::detail {
namespace {

constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

/// The keys of a wrapper: the local tensor's backend, ours above it, and the lazy bits, which
/// libtorch's kernels for them resolve before a call comes to ours. The base class adds autograd's.
c10::DispatchKeySet keys_of(const at::Tensor& local) {
  const auto backend = c10::DispatchKeySet(local.key_set().highestBackendKey()) |
                       c10::DispatchKeySet(c10::DispatchKey::Dense);
  return backend | c10::DispatchKeySet(c10::DispatchKey::Fake) | (local.key_set() & kLazyBits);
}

/// The FQN of the parameter that `impl` is, or is a view of; empty if it is none.
std::string fqn_of(c10::TensorImpl& impl) {
  const auto self = c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(&impl);
  return parameter_name(at::Tensor(self));
}

/// "parameter 'a.weight' ", or "a parameter " while it has no name.
std::string name_of(c10::TensorImpl& impl) {
  const std::string name = fqn_of(impl);
  return name.empty() ? "a parameter " : "parameter '" + name + "' ";
}

/// " in the backward of Square", a torch::autograd::Function; empty in forward, where libtorch
/// notes no function.
std::string running_backward() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return "";
  }
  std::string name = node->name();
  if (const std::string_view own = "torch::autograd::CppNode<"; name.starts_with(own)) {
    name = name.substr(own.size(), name.size() - own.size() - 1);
  }
  return " in the backward of " + name;
}

/// What libtorch says when somebody asks for data_ptr(): to print, or to compute with it.
std::string without_memory(DistributedTensorImpl& impl) {
  const std::string fqn = fqn_of(impl);
  return concat("the memory of a distributed tensor was asked for", running_backward(),
                ", which it lacks (", fqn.empty() ? "" : "'" + fqn + "', ", describe(*impl.spec()),
                "): read that of to_local() or full_tensor(), or call code that computes with "
                "memory, as a torch::autograd::Function may, by local_map; print "
                "tessera::DistributedTensor(x), or tessera::to_string of it");
}

}  // namespace

void replay_views() {
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec)
    : TensorImpl(keys_of(local), c10::scalarTypeToTypeMeta(spec->dtype), local.device()),
      local_(std::move(local)),
      spec_(std::move(spec)) {
  set_storage_access_should_throw();
  replay_views();
  adopt_metadata();
}

// This constructor of TensorImpl takes the keys as they are. Without those of autograd it makes no
// version counter, which is replaced by the local tensor's in any case: an allocation saved on
// every call. From the storage it reads the device only, so a borrowed one will do.
DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec,
                                             const c10::Storage& storage)
    : TensorImpl(VIEW, c10::MaybeOwnedTraits<c10::Storage>::createBorrow(storage),
                 local.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView,
                 c10::scalarTypeToTypeMeta(spec->dtype)),
      local_(std::move(local)),
      spec_(std::move(spec)) {
  c10::MaybeOwnedTraits<c10::Storage>::destroyBorrow(storage_);
  key_set_ = local_.key_set() | c10::DispatchKeySet(c10::DispatchKey::Fake);
  set_storage_access_should_throw();
  adopt_sizes();
  version_counter_ = local_.unsafeGetTensorImpl()->version_counter();
}

DistributedTensorImpl::DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in,
                                             TensorSpecPtr spec)
    : DistributedTensorImpl(std::move(stand_in), std::move(spec)) {
  local_ = at::Tensor();
  transfer_ = std::move(transfer);
}

/// At the first use of local(). The stand-in's version counter has been the wrapper's so far, so
/// the result takes that over. If the transfer throws it is kept, so that later uses throw as well.
void DistributedTensorImpl::wait_for_transfer() const {
  local_ = transfer_->finish();
  if (version_counter().enabled() && !local_.is_inference()) {
    local_.unsafeGetTensorImpl()->set_version_counter(version_counter());
  }
  transfer_.reset();
}

/// Sizes, and the local tensor's version counter: a write to either is a write to both. An
/// inference tensor has none to share.
void DistributedTensorImpl::adopt_metadata() {
  adopt_sizes();
  if (!is_inference() && !local_.is_inference()) {
    set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
  }
}

/// Fills in the fields that set_sizes_and_strides would compute: the spec has computed them once
/// for all tensors that have it.
void DistributedTensorImpl::adopt_sizes() {
  const auto& geometry = spec_->geometry;
  sizes_and_strides_.set_sizes(spec_->sizes);
  std::copy(spec_->strides.begin(), spec_->strides.end(), sizes_and_strides_.strides_begin());
  numel_ = geometry.numel;
  is_contiguous_ = geometry.contiguous;
  is_channels_last_ = geometry.channels_last;
  is_channels_last_contiguous_ = geometry.channels_last_contiguous;
  is_channels_last_3d_ = geometry.channels_last_3d;
  is_channels_last_3d_contiguous_ = geometry.channels_last_3d_contiguous;
  is_non_overlapping_and_dense_ = geometry.non_overlapping_and_dense;
}

void DistributedTensorImpl::replace(at::Tensor local, TensorSpecPtr spec) {
  local_ = std::move(local);
  transfer_.reset();
  spec_ = std::move(spec);
  adopt_sizes();
}

/// Another wrapper of the same local tensor, for detach() and the like. Waits for a transfer, as
/// local() does.
c10::intrusive_ptr<DistributedTensorImpl> DistributedTensorImpl::copy(bool allow_change) const {
  auto result = c10::make_intrusive<DistributedTensorImpl>(local(), spec_);
  // A copy of a tensor that is no inference tensor is none either, also in inference mode.
  if (key_set_.has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)) {
    result->key_set_ = key_set_;
  }
  result->set_allow_tensor_metadata_change(allow_change);
  result->detached_view_ = detached_view_;
  return result;
}

c10::intrusive_ptr<c10::TensorImpl> DistributedTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_change) const {
  auto result = copy(allow_change);
  if (!result->is_inference()) {
    result->set_version_counter(version_counter);
  }
  return result;
}

c10::intrusive_ptr<c10::TensorImpl> DistributedTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_change) const {
  auto result = copy(allow_change);
  if (!result->is_inference()) {
    result->set_version_counter(std::move(version_counter));
  }
  return result;
}

/// What set_data does. Only between two wrappers: a plain impl has fields that a wrapper lacks.
void DistributedTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) {
  const auto* from = dynamic_cast<const DistributedTensorImpl*>(other.get());
  TESSERA_CHECK(from != nullptr,
                "set_data of a distributed tensor needs a distributed tensor, found a plain one: "
                "distribute it first");
  // Optimizers and FSDP hold a parameter, with what they know of its layout.
  TESSERA_CHECK(!requires_grad() || (from->sizes_default() == sizes_default() &&
                                     from->spec_->sharding == spec_->sharding),
                "set_data of ", name_of(*this), "of sizes ", sizes_default(), " and laid out as ",
                to_string(*spec_->sharding.layout), " needs a tensor of these sizes and layout, ",
                "found ", from->sizes_default(), " and ", to_string(*from->spec_->sharding.layout),
                "; copy values into it under a NoGradGuard (copy_) instead");
  replace(from->local(), from->spec_);
  // As for plain tensors: a module's to() changes its parameters so.
  data_type_ = from->data_type_;
  device_opt_ = from->device_opt_;
  key_set_ = from->key_set_;
  detached_view_ = from->detached_view_;
}

/// libtorch calls this when the last strong reference goes while a weak one is left. Local memory
/// must not wait for that one.
void DistributedTensorImpl::release_resources() {
  local_.reset();
  transfer_.reset();
  detached_view_.reset();
  TensorImpl::release_resources();
}

// The message takes an allocation: made when somebody asks, not for every wrapper.
bool DistributedTensorImpl::has_storage() const {
  // const by the base class's declaration; the message is no part of a tensor's value.
  auto* self = const_cast<DistributedTensorImpl*>(this);
  std::string message = without_memory(*self);
  // One for all tensors: asking is rare.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& extra = self->extra_meta_;
  if (extra == nullptr) {
    extra = std::make_unique<c10::ExtraMeta>();
  }
  if (extra->custom_data_ptr_error_msg_ != message) {
    extra->custom_data_ptr_error_msg_ = std::move(message);
  }
  return false;
}

const char* DistributedTensorImpl::tensorimpl_type_name() const {
  return "a tessera::DistributedTensor (take to_local() or full_tensor() first)";
}

at::Tensor wrap(at::Tensor local, TensorSpecPtr spec) {
  auto* impl = local.unsafeGetTensorImpl();
  replay_views();
  // Also in inference mode: a view of a tensor that is no inference tensor is none either.
  const bool ordinary = !impl->is_inference();
  if (const auto& storage = impl->unsafe_storage(); storage && ordinary) [[likely]] {
    return at::Tensor(
        c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec), storage));
  }
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec)));
}

// The base class reads keys and device off a tensor, and the result is not there yet.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec) {
  BelowAutograd guard;
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(
      std::move(transfer), at::empty({0}, like.options()), std::move(spec)));
}

at::Tensor plain_alias(const at::Tensor& local) {
  auto* impl = local.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), impl->allow_tensor_metadata_change()));
}

}  // namespace tessera::detail

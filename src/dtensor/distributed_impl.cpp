#include "distributed_impl.h"

#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "below_autograd.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

c10::DispatchKeySet keys_of(const at::Tensor& local) {
  const auto backend = c10::DispatchKeySet(local.key_set().highestBackendKey()) |
                       c10::DispatchKeySet(c10::DispatchKey::Dense);
  return backend | c10::DispatchKeySet(c10::DispatchKey::Fake) | (local.key_set() & kLazyBits);
}

constexpr const char* kNoMemory =
    "the memory of a distributed tensor was asked for, which it lacks: read that of to_local() or "
    "full_tensor(); print tessera::DistributedTensor(x), or tessera::to_string of it";

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

// This constructor of TensorImpl takes the keys as they are. Given none of autograd it makes no
// version counter, and the tensor can take the local one's. Of the storage it takes the device.
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

/// The transfer stays where it is if it throws, so that later uses throw as well.
void DistributedTensorImpl::settle() const {
  local_ = transfer_->finish();
  if (version_counter().enabled() && !local_.is_inference()) {
    local_.unsafeGetTensorImpl()->set_version_counter(version_counter());
  }
  transfer_.reset();
}

void DistributedTensorImpl::adopt_metadata() {
  adopt_sizes();
  if (!is_inference() && !local_.is_inference()) {
    set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
  }
}

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

c10::intrusive_ptr<DistributedTensorImpl> DistributedTensorImpl::copy(bool allow_change) const {
  auto result = c10::make_intrusive<DistributedTensorImpl>(local(), spec_);
  // A copy of an ordinary tensor is one, also in inference mode.
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
  if (!result->is_inference()) result->set_version_counter(version_counter);
  return result;
}

c10::intrusive_ptr<c10::TensorImpl> DistributedTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_change) const {
  auto result = copy(allow_change);
  if (!result->is_inference()) result->set_version_counter(std::move(version_counter));
  return result;
}

void DistributedTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) {
  const auto* from = dynamic_cast<const DistributedTensorImpl*>(other.get());
  TESSERA_CHECK(from != nullptr,
                "set_data of a distributed tensor needs a distributed tensor, found a plain one: "
                "distribute it first");
  replace(from->local(), from->spec_);
  // As of plain tensors: a module's to() changes its parameters so.
  data_type_ = from->data_type_;
  device_opt_ = from->device_opt_;
  key_set_ = from->key_set_;
  detached_view_ = from->detached_view_;
}

void DistributedTensorImpl::release_resources() {
  local_.reset();
  transfer_.reset();
  detached_view_.reset();
  TensorImpl::release_resources();
}

// The message of a tensor is kept on the heap, so not every wrapper is given one when it is made.
bool DistributedTensorImpl::has_storage() const {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& extra = const_cast<DistributedTensorImpl*>(this)->extra_meta_;
  if (extra == nullptr) extra = std::make_unique<c10::ExtraMeta>();
  if (!extra->custom_data_ptr_error_msg_) extra->custom_data_ptr_error_msg_ = kNoMemory;
  return false;
}

const char* DistributedTensorImpl::tensorimpl_type_name() const {
  return "a tessera::DistributedTensor (take to_local() or full_tensor() first)";
}

at::Tensor wrap(at::Tensor local, TensorSpecPtr spec) {
  auto* impl = local.unsafeGetTensorImpl();
  replay_views();
  // In inference mode too: a view of an ordinary tensor is one.
  const bool ordinary = !impl->is_inference();
  if (const auto& storage = impl->unsafe_storage(); storage && ordinary) [[likely]] {
    return at::Tensor(
        c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec), storage));
  }
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec)));
}

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

// Tessera's tensor types, which have no memory: subclasses of c10::TensorImpl.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>

#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// A TensorWrapper wraps another tensor, and has sizes, strides and autograd state, but no memory.
// The public way to define a tensor type, __torch_dispatch__, is only for Python. In C++ a subclass
// of c10::TensorImpl must set the base class's fields. The functions are inline, because every
// operator result needs a wrapper.
//
// Canary: TensorWrapperCanary, a test of libtorch itself.

class TensorWrapper : public c10::TensorImpl {
 public:
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter, bool allow_change) const final {
    return copy_with(version_counter, allow_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_change) const final {
    return copy_with(std::move(version_counter), allow_change);
  }
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) final {
    assign(dynamic_cast<const TensorWrapper*>(other.get()));
  }

  /// Whether the tensor requires a gradient or has an autograd history.
  bool has_autograd_state() const { return autograd_meta() != nullptr; }
  /// Makes `inner`, which will become the inner tensor, share the version counter of the wrapper.
  void give_count_to(const at::Tensor& inner) const {
    if (version_counter().enabled() && !inner.is_inference()) {
      inner.unsafeGetTensorImpl()->set_version_counter(version_counter());
    }
  }

 protected:
  /// Makes a second wrapper of the same inner tensor, for detach() and similar functions.
  virtual c10::intrusive_ptr<TensorWrapper> copy() const = 0;
  /// Implements Tensor::set_data(). `other`: the new data as a wrapper; nullptr if the new data
  /// have no wrapper.
  virtual void assign(const TensorWrapper* other) = 0;

  /// Makes a wrapper with the device of `inner`. The caller must set the sizes and the version
  /// counter.
  TensorWrapper(const at::Tensor& inner, c10::ScalarType dtype)
      : TensorImpl(keys_of(inner), c10::scalarTypeToTypeMeta(dtype), inner.device()) {
    set_storage_access_should_throw();
  }

  /// A faster constructor for an `inner` that has memory and is not an inference tensor. The
  /// wrapper shares the version counter of `inner`. Autograd's keys are added after TensorImpl's
  /// constructor, which would otherwise allocate a version counter. The constructor does not change
  /// the reference count of `storage`.
  TensorWrapper(const at::Tensor& inner, c10::ScalarType dtype, const c10::Storage& storage)
      : TensorImpl(VIEW, c10::MaybeOwnedTraits<c10::Storage>::createBorrow(storage),
                   inner.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView,
                   c10::scalarTypeToTypeMeta(dtype)) {
    c10::MaybeOwnedTraits<c10::Storage>::destroyBorrow(storage_);
    key_set_ = inner.key_set() | c10::DispatchKeySet(kDistributedKey);
    set_storage_access_should_throw();
    version_counter_ = inner.unsafeGetTensorImpl()->version_counter();
  }

  /// Sets sizes and strides, and the fields that set_sizes_and_strides() would compute from them.
  void set_shape(c10::IntArrayRef sizes, c10::IntArrayRef strides, const ShapeGeometry& geometry) {
    sizes_and_strides_.set_sizes(sizes);
    std::copy(strides.begin(), strides.end(), sizes_and_strides_.strides_begin());
    numel_ = geometry.numel;
    is_contiguous_ = geometry.contiguous;
    is_channels_last_ = geometry.channels_last;
    is_channels_last_contiguous_ = geometry.channels_last_contiguous;
    is_channels_last_3d_ = geometry.channels_last_3d;
    is_channels_last_3d_contiguous_ = geometry.channels_last_3d_contiguous;
    is_non_overlapping_and_dense_ = geometry.non_overlapping_and_dense;
  }

  /// Makes the wrapper share the version counter of `inner`, so that a write to one tensor counts
  /// for both tensors. An inference tensor has no counter to share.
  void count_with(const at::Tensor& inner) {
    if (!is_inference() && !inner.is_inference()) {
      set_version_counter(inner.unsafeGetTensorImpl()->version_counter());
    }
  }

  /// Copies the dtype, device and dispatch keys of `other`, as set_data() does for other tensors.
  void take_kind_of(const TensorWrapper& other) {
    data_type_ = other.data_type_;
    device_opt_ = other.device_opt_;
    key_set_ = other.key_set_;
  }

  /// Sets the error message that libtorch throws for calls of data_ptr(). Not thread safe.
  void set_memory_error(std::string message) {
    if (extra_meta_ == nullptr) {
      extra_meta_ = std::make_unique<c10::ExtraMeta>();
    }
    if (extra_meta_->custom_data_ptr_error_msg_ != message) {
      extra_meta_->custom_data_ptr_error_msg_ = std::move(message);
    }
  }

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy_with(Version&& version, bool allow_change) const {
    c10::intrusive_ptr<TensorWrapper> result = copy();
    // In inference mode, the copy of a normal tensor must not become an inference tensor.
    if (key_set_.has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)) {
      result->key_set_ = key_set_;
    }
    result->set_allow_tensor_metadata_change(allow_change);
    if (!result->is_inference()) {
      result->set_version_counter(std::forward<Version>(version));
    }
    return result;
  }

  /// Returns a wrapper's dispatch keys: the backend's key of `inner`, kDistributedKey, and the keys
  /// of lazy conjugation and negation, which libtorch resolves before Tessera's kernel. The base
  /// class adds autograd's keys.
  static c10::DispatchKeySet keys_of(const at::Tensor& inner) {
    constexpr c10::DispatchKeySet kLazyBits(
        {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return c10::DispatchKeySet(inner.key_set().highestBackendKey()) |
           c10::DispatchKeySet(c10::DispatchKey::Dense) | c10::DispatchKeySet(kDistributedKey) |
           (inner.key_set() & kLazyBits);
  }
};

/// Returns `tensor` as a `Wrapper`, which must be a final class, or nullptr. Compares the class and
/// not the dispatch key, because Tensor::set_data() copies keys.
template <class Wrapper>
Wrapper* wrapper_cast(const at::TensorBase& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has(kDistributedKey)) {
    return nullptr;
  }
  return &typeid(*impl) == &typeid(Wrapper) ? static_cast<Wrapper*>(impl) : nullptr;
}

/// Returns the tensor's storage; an empty storage where Tensor::storage() would throw.
inline const c10::Storage& storage_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

/// After a write to a view, makes autograd replay the view operators, because as_strided needs
/// memory. Call replay_views() before each use: the setting is thread-local, and libtorch's guards
/// reset the setting.
void replay_views();

// A placeholder tensor, which can be stored but not read. A special dispatch key (dispatch_keys.h)
// sends every operator to Tessera's fallback. No public function makes a tensor without a backend's
// key.
//
// Canary: PlaceholderTensorCanary, a test of libtorch itself.

class PlaceholderTensor : public c10::TensorImpl {
 public:
  /// Makes a placeholder that reports the sizes, type and device of `like`, for error messages.
  explicit PlaceholderTensor(const at::Tensor& like);

  /// Throws Error with the reason why the placeholder tensor cannot be read.
  [[noreturn]] virtual void refuse() const = 0;

  // Implements Tensor::data(), which some optimizers call before any operator.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&,
                                                         bool) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&,
                                                         bool) const override;
};

template <class Impl, class... Arguments>
at::Tensor make_placeholder(Arguments&&... arguments) {
  return at::Tensor(c10::make_intrusive<Impl>(std::forward<Arguments>(arguments)...));
}

}  // namespace tessera::detail
TESSERA_API_END

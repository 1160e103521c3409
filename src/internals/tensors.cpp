#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <utility>

#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensor_wrapper.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// A tensor that has only sizes and strides: no memory, and no dispatch key of a backend.
class ShapeOnly final : public c10::TensorImpl {
 public:
  ShapeOnly(c10::IntArrayRef sizes, c10::IntArrayRef strides)
      : TensorImpl(c10::DispatchKeySet(), c10::scalarTypeToTypeMeta(c10::ScalarType::Byte),
                   c10::Device(c10::kMeta)) {
    set_sizes_and_strides(sizes, strides);
  }
  ShapeGeometry geometry() const {
    return {.numel = numel_,
            .contiguous = is_contiguous_,
            .channels_last = is_channels_last_,
            .channels_last_contiguous = is_channels_last_contiguous_,
            .channels_last_3d = is_channels_last_3d_,
            .channels_last_3d_contiguous = is_channels_last_3d_contiguous_,
            .non_overlapping_and_dense = is_non_overlapping_and_dense_};
  }
};

}  // namespace

void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  impl.set_data_ptr_noswap(std::move(memory));
  impl.set_nbytes(static_cast<std::size_t>(bytes));
}

void free_memory(const c10::Storage& storage) {
  // The storage keeps its device, because tensors take their device from their storage.
  set_memory(storage, at::DataPtr(nullptr, storage.device()), 0);
}

void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // By default, libtorch throws when the storage of a tensor from detach() is changed.
  impl.set_allow_tensor_metadata_change(true);
  impl.set_storage_keep_dtype(storage);
  impl.set_storage_offset(offset);
}

at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype) {
  at::Tensor tensor = at::empty({0}, at::dtype(dtype).device(storage.device()));
  move_onto(tensor, storage, offset);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

PlaceholderTensor::PlaceholderTensor(const at::Tensor& like)
    : TensorImpl(c10::DispatchKeySet(kPlaceholderKey), like.dtype(), like.device()) {
  set_sizes_contiguous(like.sizes());
}

c10::intrusive_ptr<c10::TensorImpl> PlaceholderTensor::shallow_copy_and_detach(
    const c10::VariableVersion&, bool) const {
  refuse();
  return nullptr;  // unreachable, but g++ warns without a return statement
}

c10::intrusive_ptr<c10::TensorImpl> PlaceholderTensor::shallow_copy_and_detach(
    c10::VariableVersion&&, bool) const {
  refuse();
  return nullptr;
}

ShapeGeometry shape_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return ShapeOnly(sizes, strides).geometry();
}

std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of) {
  return of.transposed
             ? at::native::conv_input_size(input, weight, of.padding, of.output_padding, of.stride,
                                           of.dilation, of.groups)
             : at::native::conv_output_size(input, weight, of.padding, of.stride, of.dilation);
}

std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes) {
  return at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
}

at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::detail::empty_strided_meta(sizes, strides, dtype, c10::kStrided,
                                        c10::Device(c10::kMeta), std::nullopt);
}

void replay_views() {
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

}  // namespace tessera::detail

namespace at::native {

void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);

}  // namespace at::native

namespace tessera::detail {

bool has_onednn() {
  return at::Context::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
}

void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha) {
  at::native::mkldnn_matmul(a, b, result, beta, alpha);
}

}  // namespace tessera::detail

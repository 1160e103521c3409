// Canaries: what a tensor's impl tells and lets one change.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "tessera/internals/detail/alias_tensor.h"
#include "tessera/internals/detail/memory_under_tensors.h"
#include "tessera/internals/detail/shape_geometry.h"
#include "tessera/internals/detail/tensor_identity.h"
#include "tessera/internals/detail/version_counter.h"
#include "tessera/internals/detail/wrapped_number.h"

namespace tessera::detail {
namespace {

TEST(VersionCounterCanary, CountsWritesOfOperatorsAndExplicitOnes) {
  const at::Tensor x = at::ones({2});
  const std::uint32_t before = writes_of(x);
  x.add_(1);
  EXPECT_EQ(writes_of(x), before + 1);
  count_write(x);
  EXPECT_EQ(writes_of(x), before + 2);
  EXPECT_EQ(x._version(), before + 2);
}

TEST(VersionCounterCanary, MakesAutogradRefuseTensorsWrittenSince) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor factor = at::ones({2});
  const at::Tensor loss = (x * factor).sum();
  count_write(factor);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(VersionCounterCanary, IsSharedOnceAsked) {
  const at::Tensor x = at::ones({2});
  const at::Tensor y = at::ones({2});
  count_with(y, x);
  const std::uint32_t before = writes_of(x);
  x.add_(1);
  EXPECT_EQ(writes_of(y), before + 1);
  y.add_(1);
  EXPECT_EQ(writes_of(x), before + 2);
}

TEST(VersionCounterCanary, IsAbsentForAnInferenceTensor) {
  const at::Tensor x = [] {
    const c10::InferenceMode inference;
    return at::ones({2});
  }();
  EXPECT_EQ(writes_of(x), 0u);
  EXPECT_THROW(count_write(x), c10::Error);
}

TEST(WrappedNumberCanary, DoesNotDecideTheTypeOfAResult) {
  const at::Tensor x = at::ones({2}, at::kInt);
  const at::Tensor number = at::full({}, 0.5, at::kDouble);
  EXPECT_FALSE(is_wrapped_number(number));
  EXPECT_EQ(at::result_type(x, number), at::kDouble);
  make_wrapped_number(number);
  EXPECT_TRUE(is_wrapped_number(number));
  EXPECT_EQ(at::result_type(x, number), at::kFloat);
}

TEST(TensorIdentityCanary, IsThatOfAllHandles) {
  at::Tensor x = at::ones({2});
  const at::Tensor y = x;
  EXPECT_EQ(identity_of(x), identity_of(y));
  EXPECT_NE(identity_of(x), identity_of(x.detach()));
  EXPECT_TRUE(tensor_of(*impl_cast<c10::TensorImpl>(x)).is_same(x));
  EXPECT_EQ(x.use_count(), 2u);
}

TEST(TensorIdentityCanary, IsKeptWeakly) {
  at::Tensor x = at::ones({2});
  const WeakTensor weak(x);
  EXPECT_TRUE(weak.lock().is_same(x));
  EXPECT_EQ(x.use_count(), 1u);
  x.reset();
  EXPECT_FALSE(weak.lock().defined());
}

TEST(AliasTensorCanary, SharesMemoryAndCountButNoHistory) {
  const at::Tensor x = at::ones({2}).requires_grad_() * 2;
  const at::Tensor alias = alias_tensor(x, /*allows_change=*/true);
  EXPECT_FALSE(alias.requires_grad());
  EXPECT_TRUE(alias.is_alias_of(x));
  const std::uint32_t before = writes_of(x);
  alias.add_(1);
  EXPECT_EQ(writes_of(x), before + 1);
}

TEST(AliasTensorCanary, TakesTheStateOfItsKindAlone) {
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(may_take_state_of(x, at::ones({3})));
  EXPECT_FALSE(may_take_state_of(x, at::sparse_coo_tensor({2}, at::kFloat)));
}

/// As much memory as two floats take, of the CPU's allocator.
void allocate(const c10::Storage& storage) {
  set_memory(storage, storage.allocator()->allocate(2 * sizeof(float)), 2 * sizeof(float));
}

TEST(MemoryUnderTensorsCanary, MayBeFreedAndRestoredUnderTensorsSavedByAutograd) {
  const c10::Storage storage = at::empty({0}, at::kByte).storage();
  const at::Tensor tensor = tensor_over(storage, 0, {2}, at::kFloat);
  allocate(storage);
  tensor.data_ptr<float>()[0] = tensor.data_ptr<float>()[1] = 2;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor loss = (x * tensor).sum();
  free_memory(storage);
  EXPECT_EQ(storage.nbytes(), 0u);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({2}));
  EXPECT_EQ(storage.data(), nullptr);
  allocate(storage);
  tensor.data_ptr<float>()[0] = tensor.data_ptr<float>()[1] = 3;
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
}

TEST(MemoryUnderTensorsCanary, ChangesUnderATensorThatStays) {
  const at::Tensor memory = at::arange(6, at::kFloat);
  const at::Tensor tensor = at::zeros({2}).detach();
  const std::uint32_t before = writes_of(tensor);
  move_onto(tensor, memory.storage(), 4);
  EXPECT_TRUE(at::equal(tensor, memory.narrow(0, 4, 2)));
  EXPECT_TRUE(tensor.is_alias_of(memory));
  EXPECT_EQ(writes_of(tensor), before);
}

TEST(MemoryUnderTensorsCanary, GivesATensorItsSizesBack) {
  const at::Tensor tensor = at::zeros({4, 2});
  tensor.resize_({3});
  restore_sizes(tensor, {4, 2}, {2, 1});
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({4, 2}));
  EXPECT_EQ(tensor.strides(), at::IntArrayRef({2, 1}));
}

void expect_as_libtorch(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::Tensor tensor = at::empty_strided(sizes, strides);
  const ShapeGeometry geometry = shape_geometry(sizes, strides);
  EXPECT_EQ(geometry.numel, tensor.numel());
  EXPECT_EQ(geometry.contiguous, tensor.is_contiguous());
  EXPECT_EQ(geometry.channels_last_contiguous,
            tensor.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(geometry.channels_last_3d_contiguous,
            tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  EXPECT_EQ(geometry.non_overlapping_and_dense, tensor.is_non_overlapping_and_dense());
  const bool suggested = tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  EXPECT_EQ(geometry.channels_last, suggested);
}

TEST(ShapeGeometryCanary, IsWhatLibtorchComputesForATensor) {
  expect_as_libtorch({2, 3}, {3, 1});
  expect_as_libtorch({2, 3}, {1, 2});
  expect_as_libtorch({2, 3}, {0, 1});
  expect_as_libtorch({2, 3, 4, 5}, {60, 20, 5, 1});
  expect_as_libtorch({2, 3, 4, 5}, {60, 1, 15, 3});
  expect_as_libtorch({2, 3, 4, 5}, {120, 1, 30, 6});
  expect_as_libtorch({2, 3, 2, 2, 2}, {24, 1, 12, 6, 3});
}

}  // namespace
}  // namespace tessera::detail

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensor_wrapper.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

// Canaries (tests that fail if libtorch changes): reads and writes of a TensorImpl.

TEST(VersionCounterCanary, CountsOperatorAndExplicitWrites) {
  const at::Tensor x = at::ones({2});
  const std::uint32_t before = writes_of(x);
  x.add_(1);
  EXPECT_EQ(writes_of(x), before + 1);
  count_write(x);
  EXPECT_EQ(writes_of(x), before + 2);
  EXPECT_EQ(x._version(), before + 2);
}

TEST(VersionCounterCanary, MakesAutogradRefuseWrittenTensors) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor factor = at::ones({2});
  const at::Tensor loss = (x * factor).sum();
  count_write(factor);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(VersionCounterCanary, CanBeShared) {
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

TEST(TensorIdentityCanary, IsEqualForAllHandles) {
  at::Tensor x = at::ones({2});
  const at::Tensor y = x;
  EXPECT_EQ(identity_of(x), identity_of(y));
  EXPECT_NE(identity_of(x), identity_of(x.detach()));
  EXPECT_TRUE(tensor_of(*impl_cast<c10::TensorImpl>(x)).is_same(x));
  EXPECT_EQ(x.use_count(), 2u);
}

TEST(AliasTensorCanary, SharesMemoryAndVersionButNoHistory) {
  const at::Tensor x = at::ones({2}).requires_grad_() * 2;
  const at::Tensor alias = alias_tensor(x);
  EXPECT_FALSE(alias.requires_grad());
  EXPECT_TRUE(alias.is_alias_of(x));
  const std::uint32_t before = writes_of(x);
  alias.add_(1);
  EXPECT_EQ(writes_of(x), before + 1);
}

TEST(AliasTensorCanary, TakesStateOnlyFromTheSameTensorKind) {
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(may_take_state_of(x, at::ones({3})));
  EXPECT_FALSE(may_take_state_of(x, at::sparse_coo_tensor({2}, at::kFloat)));
}

void allocate(const c10::Storage& storage) {
  set_memory(storage, storage.allocator()->allocate(2 * sizeof(float)), 2 * sizeof(float));
}

TEST(MemoryUnderTensorsCanary, CanBeFreedAndRestoredUnderSavedTensors) {
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

TEST(MemoryUnderTensorsCanary, CanBeReplacedUnderATensor) {
  const at::Tensor memory = at::arange(6, at::kFloat);
  const at::Tensor tensor = at::zeros({2}).detach();
  const std::uint32_t before = writes_of(tensor);
  move_onto(tensor, memory.storage(), 4);
  EXPECT_TRUE(at::equal(tensor, memory.narrow(0, 4, 2)));
  EXPECT_TRUE(tensor.is_alias_of(memory));
  EXPECT_EQ(writes_of(tensor), before);
}

TEST(MemoryUnderTensorsCanary, RestoresTensorSizes) {
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

TEST(ShapeGeometryCanary, AgreesWithLibtorch) {
  expect_as_libtorch({2, 3}, {3, 1});
  expect_as_libtorch({2, 3}, {1, 2});
  expect_as_libtorch({2, 3}, {0, 1});
  expect_as_libtorch({2, 3, 4, 5}, {60, 20, 5, 1});
  expect_as_libtorch({2, 3, 4, 5}, {60, 1, 15, 3});
  expect_as_libtorch({2, 3, 4, 5}, {120, 1, 30, 6});
  expect_as_libtorch({2, 3, 2, 2, 2}, {24, 1, 12, 6, 3});
}

// Canaries: TensorImpl classes of the library, with dispatch keys reserved for extensions.

class Wrapper final : public TensorWrapper {
 public:
  explicit Wrapper(at::Tensor inner)
      : TensorWrapper(inner, inner.scalar_type()), inner_(std::move(inner)) {
    begin();
    count_with(inner_);
  }
  Wrapper(at::Tensor inner, const c10::Storage& storage)
      : TensorWrapper(inner, inner.scalar_type(), storage), inner_(std::move(inner)) {
    begin();
  }
  const at::Tensor& inner() const { return inner_; }

 protected:
  c10::intrusive_ptr<TensorWrapper> copy() const override {
    return c10::make_intrusive<Wrapper>(inner_);
  }
  void assign(const TensorWrapper* other) override {
    const auto* from = dynamic_cast<const Wrapper*>(other);
    inner_ = from->inner_;
    take_kind_of(*from);
    begin();
  }

 private:
  void begin() {
    set_shape(inner_.sizes(), inner_.strides(), shape_geometry(inner_.sizes(), inner_.strides()));
    set_memory_error("it is a wrapper");
  }

  at::Tensor inner_;
};

at::Tensor wrapped(const at::Tensor& inner) {
  return at::Tensor(c10::make_intrusive<Wrapper>(inner));
}

const at::Tensor& inner_of(const at::Tensor& tensor) {
  return wrapper_cast<Wrapper>(tensor)->inner();
}

void run_inside(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  for (c10::IValue& value : *stack) {
    if (value.isTensor() && wrapper_cast<Wrapper>(value.toTensor()) != nullptr) {
      value = at::Tensor(inner_of(value.toTensor()));
    }
  }
  const ExcludeKeys below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                          c10::DispatchKeySet(kDistributedKey));
  op.callBoxed(stack);
  for (c10::IValue& value : *stack) {
    if (value.isTensor()) {
      value = wrapped(value.toTensor());
    }
  }
}

class TensorWrapperCanary : public testing::Test {
 protected:
  TensorWrapperCanary() : library_(torch::Library::IMPL, "_", kDistributedKey, __FILE__, __LINE__) {
    library_.fallback(torch::CppFunction::makeFromBoxedFunction<&run_inside>());
  }
  torch::Library library_;
};

TEST_F(TensorWrapperCanary, IsDifferentiable) {
  const at::Tensor x = wrapped(at::ones({2, 3}));
  x.requires_grad_();
  const at::Tensor y = x * wrapped(at::full({2, 3}, 2.0)) * 3;
  ASSERT_NE(wrapper_cast<Wrapper>(y), nullptr);
  y.backward(wrapped(at::ones({2, 3})));
  EXPECT_TRUE(at::equal(inner_of(x.grad()), at::full({2, 3}, 6.0)));
}

TEST_F(TensorWrapperCanary, HasTheGivenShape) {
  const at::Tensor inner = at::ones({2, 3}).t();
  const at::Tensor x = wrapped(inner);
  EXPECT_EQ(x.sizes(), inner.sizes());
  EXPECT_EQ(x.strides(), inner.strides());
  EXPECT_EQ(x.numel(), 6);
  EXPECT_FALSE(x.is_contiguous());
  EXPECT_TRUE(x.is_non_overlapping_and_dense());
  EXPECT_EQ(x.scalar_type(), at::kFloat);
  EXPECT_TRUE(x.is_cpu());
}

TEST_F(TensorWrapperCanary, HasNoDataPointer) {
  const at::Tensor x = wrapped(at::ones({2}));
  EXPECT_FALSE(storage_of(x));
  try {
    x.data_ptr();
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("it is a wrapper"), std::string::npos);
  }
}

TEST_F(TensorWrapperCanary, SharesTheVersionOfItsInnerTensor) {
  const at::Tensor inner = at::ones({2});
  const at::Tensor x = wrapped(inner);
  const at::Tensor cheap = at::Tensor(c10::make_intrusive<Wrapper>(inner, storage_of(inner)));
  const std::uint32_t before = writes_of(inner);
  count_write(x);
  EXPECT_EQ(writes_of(inner), before + 1);
  count_write(cheap);
  EXPECT_EQ(writes_of(x), before + 2);
  EXPECT_TRUE(at::equal(inner_of(cheap + cheap), inner + inner));
}

TEST_F(TensorWrapperCanary, RemainsAWrapperAfterCopyAndAssignment) {
  const at::Tensor x = wrapped(at::ones({2}));
  const at::Tensor copy = x.variable_data();
  EXPECT_FALSE(copy.is_same(x));
  EXPECT_TRUE(inner_of(copy).is_same(inner_of(x)));
  const at::Tensor other = wrapped(at::full({2}, 5.0));
  impl_cast<Wrapper>(copy)->shallow_copy_from(other.getIntrusivePtr());
  EXPECT_TRUE(inner_of(copy).is_same(inner_of(other)));
  EXPECT_EQ(wrapper_cast<Wrapper>(at::ones({2})), nullptr);
}

TEST_F(TensorWrapperCanary, IsAnInferenceTensorOnlyIfItsOriginalIs) {
  const at::Tensor x = wrapped(at::ones({2}));
  const c10::InferenceMode inference;
  EXPECT_FALSE(x.variable_data().is_inference());
}

TEST_F(TensorWrapperCanary, ReplaysViewsInBackward) {
  replay_views();
  const at::Tensor x = wrapped(at::ones({4}));
  x.requires_grad_();
  const at::Tensor y = x * 1;
  y.narrow(0, 0, 2).mul_(3);
  y.backward(wrapped(at::ones({4})));
  EXPECT_TRUE(at::equal(inner_of(x.grad()), at::tensor({3.0F, 3.0F, 1.0F, 1.0F})));
}

class Refusing final : public PlaceholderTensor {
 public:
  using PlaceholderTensor::PlaceholderTensor;
  [[noreturn]] void refuse() const override { throw std::runtime_error("a placeholder"); }
};

int refused = 0;

void refuse_call(const c10::OperatorHandle&, torch::jit::Stack*) {
  ++refused;
  throw std::runtime_error("a placeholder");
}

TEST(PlaceholderTensorCanary, SendsEveryOperatorToItsFallback) {
  torch::Library library(torch::Library::IMPL, "_", kPlaceholderKey, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_call>());
  const at::Tensor x = at::ones({2, 3}).requires_grad_();
  x.mutable_grad() = make_placeholder<Refusing>(x);
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_NE(impl_cast<PlaceholderTensor>(x.grad()), nullptr);
  EXPECT_THROW(at::add(at::ones({2, 3}), x.grad()), std::runtime_error);
  EXPECT_THROW(x.grad().zero_(), std::runtime_error);
  EXPECT_EQ(refused, 2);
}

TEST(PlaceholderTensorCanary, CannotBeCopied) {
  const at::Tensor gradient = make_placeholder<Refusing>(at::ones({2}));
  EXPECT_THROW(gradient.data(), std::runtime_error);
}

// Canaries: libtorch's composite operators, and matrix products by oneDNN.

TEST(CompositeKernelsCanary, AreStillCompositions) {
  for (const auto& [name, overload] : std::vector<std::pair<const char*, const char*>>{
           {"aten::ctc_loss", "Tensor"},
           {"aten::kron", "out"},
           {"aten::matmul", "out"},
           {"aten::max_pool1d", ""},
           {"aten::nanquantile", ""},
           {"aten::nanquantile", "scalar"},
           {"aten::nanquantile", "out"},
           {"aten::nanquantile", "scalar_out"},
           {"aten::one_hot", ""},
           {"aten::quantile", ""},
           {"aten::quantile", "scalar"},
           {"aten::quantile", "out"},
           {"aten::quantile", "scalar_out"},
           {"aten::reshape", ""},
           {"aten::tensor_split", "tensor_indices_or_sections"},
           {"aten::value_selecting_reduction_backward", ""}}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    ASSERT_TRUE(op.has_value()) << name;
    EXPECT_TRUE(op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) << name;
  }
}

TEST(CompositeKernelsCanary, AgreeWithTheOperators) {
  const at::Tensor x = at::arange(6, at::kFloat).view({2, 3});
  EXPECT_TRUE(at::equal(composite::reshape(x, {3, 2}), x.reshape({3, 2})));
  EXPECT_EQ(composite::tensor_split(x, at::tensor({1}, at::kLong), 0).size(), 2u);
}

// With integers as factors, the sums of products are exact in any order.
TEST(CpuProductsCanary, OneDnnAddsToTheResultAndReadsTransposes) {
  ASSERT_TRUE(has_onednn());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") == 0) {
    GTEST_SKIP() << "libtorch refuses oneDNN's products on a processor without AVX-512";
  }
#endif
  const at::Tensor a = at::randint(-4, 5, {40, 24}, at::kFloat);
  const at::Tensor b = at::randint(-4, 5, {24, 56}, at::kFloat);
  const at::Tensor product = libtorch_cpu::mm(a, b);
  const at::Tensor before = at::randint(-4, 5, {40, 56}, at::kFloat);
  for (const at::Tensor& x : {a, a.t().contiguous().t()}) {
    for (const at::Tensor& y : {b, b.t().contiguous().t()}) {
      at::Tensor result = at::full({40, 56}, std::numeric_limits<float>::quiet_NaN());
      onednn_product(x, y, result, /*beta=*/0, /*alpha=*/1);
      EXPECT_TRUE(at::equal(result, product));
      result = before.clone();
      onednn_product(x, y, result, /*beta=*/0.5, /*alpha=*/-2);
      EXPECT_TRUE(at::equal(result, before * 0.5 - product * 2));
    }
  }
}

TEST(UnboxedCallCanary, TakesResultsOffAStack) {
  const at::Tensor x = at::ones({2});
  torch::jit::Stack stack{x};
  EXPECT_TRUE(take_result<at::Tensor>(stack).is_same(x));
  stack = {x, x + 1};
  const auto [first, second] = take_result<std::tuple<at::Tensor, at::Tensor>>(stack);
  EXPECT_TRUE(first.is_same(x));
  EXPECT_TRUE(at::equal(second, x + 1));
  stack = {std::vector<at::Tensor>{x, x}};
  EXPECT_EQ(take_result<std::vector<at::Tensor>>(stack).size(), 2u);
}

at::Tensor twice(const at::Tensor& x) {
  return x * 2;
}

TEST(RefusedGradientCanary, ThrowsOnlyInBackward) {
  torch::Library library(torch::Library::DEF, "canary", std::nullopt, __FILE__, __LINE__);
  library.def("twice(Tensor x) -> Tensor");
  library.impl("twice", torch::dispatch(c10::DispatchKey::CPU, &twice));
  library.impl("twice", torch::dispatch(c10::DispatchKey::Autograd, refuse_gradient()));
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("canary::twice", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  EXPECT_TRUE(at::equal(op.call(at::ones({2})), at::full({2}, 2.0)));
  const at::Tensor y = op.call(at::ones({2}).requires_grad_());
  EXPECT_TRUE(y.requires_grad());
  EXPECT_THROW(y.sum().backward(), std::exception);
}

TEST(ShapesByLibtorchCanary, AgreeWithConvolutions) {
  const at::Tensor input = at::zeros({2, 4, 9, 10});
  const at::Tensor weight = at::zeros({6, 4, 3, 3});
  Convolution of{.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}};
  EXPECT_EQ(convolution_sizes(input.sizes(), weight.sizes(), of),
            at::conv2d(input, weight, {}, of.stride, of.padding, of.dilation).sizes().vec());
  of.transposed = true;
  of.output_padding = {1, 0};
  const at::Tensor back = at::zeros({2, 6, 5, 6});
  EXPECT_EQ(convolution_sizes(back.sizes(), weight.sizes(), of),
            at::conv_transpose2d(back, weight, {}, of.stride, of.padding, of.output_padding,
                                 of.groups, of.dilation)
                .sizes()
                .vec());
}

TEST(ShapesByLibtorchCanary, AgreeWithViews) {
  const at::Tensor x = at::zeros({4, 6}).narrow(1, 0, 3);
  EXPECT_EQ(strides_of_view(x, {2, 2, 3}), x.view({2, 2, 3}).strides().vec());
  EXPECT_EQ(strides_of_view(x, {12}), std::nullopt);
}

TEST(ShapesByLibtorchCanary, AreGivenToMetaTensors) {
  const at::Tensor meta = meta_tensor({2, 3}, {1, 2}, at::kHalf);
  EXPECT_TRUE(meta.is_meta());
  EXPECT_EQ(meta.strides(), at::IntArrayRef({1, 2}));
  EXPECT_EQ(meta.scalar_type(), at::kHalf);
}

// Canaries: libtorch's reserved dispatch keys, and the thread-local sets of dispatch keys.

int arrived = 0;

template <c10::DispatchKey key>
void note(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ++arrived;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

template <c10::DispatchKey key>
torch::Library notes_calls() {
  torch::Library library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&note<key>>());
  return library;
}

template <c10::DispatchKey key>
int calls_that_arrive() {
  const torch::Library library = notes_calls<key>();
  const at::Tensor x = at::ones({2});
  arrived = 0;
  EXPECT_TRUE(at::equal(at::neg(x), at::full({2}, -1.0)));
  EXPECT_EQ(arrived, 0);
  const IncludeKeys include(key);
  at::neg(x);
  return arrived;
}

TEST(LentKeysCanary, ReceiveCallsIfAThreadIncludesThem) {
  EXPECT_EQ(calls_that_arrive<kDistributedKey>(), 1);
  EXPECT_EQ(calls_that_arrive<kRandomKey>(), 1);
  EXPECT_EQ(calls_that_arrive<kFakeModeKey>(), 1);
}

TEST(LentKeysCanary, PlaceholdersHaveNoFallbackOfLibtorch) {
  EXPECT_NO_THROW(notes_calls<kPlaceholderKey>());
}

bool is_first(c10::DispatchKey first, c10::DispatchKey second) {
  const auto both = c10::DispatchKeySet(first) | c10::DispatchKeySet(second);
  return both.highestPriorityTypeId() == first;
}

TEST(LentKeysCanary, HaveTheExpectedPriority) {
  EXPECT_TRUE(is_first(kRandomKey, c10::DispatchKey::AutogradCPU));
  EXPECT_TRUE(is_first(c10::DispatchKey::AutogradCPU, kDistributedKey));
  EXPECT_TRUE(is_first(c10::DispatchKey::ADInplaceOrView, kDistributedKey));
  EXPECT_TRUE(is_first(kDistributedKey, kFakeModeKey));
  EXPECT_TRUE(is_first(kFakeModeKey, c10::DispatchKey::CPU));
}

TEST(KeyScopesCanary, IncludeAndExclude) {
  EXPECT_FALSE(is_included(kDistributedKey));
  EXPECT_FALSE(is_below_autograd());
  const at::Tensor x = at::ones({2}).requires_grad_();
  {
    const IncludeKeys include(kDistributedKey);
    const ExcludeKeys exclude(c10::autograd_dispatch_keyset);
    EXPECT_TRUE(is_included(kDistributedKey));
    EXPECT_TRUE(is_below_autograd());
    const ExcludeKeys not_here(kDistributedKey);
    EXPECT_FALSE((x * 2).requires_grad());
  }
  EXPECT_FALSE(is_included(kDistributedKey));
  EXPECT_FALSE(is_below_autograd());
}

TEST(KeyScopesCanary, RestoreEarlierKeys) {
  const KeysOfThread before = keys_of_thread();
  const IncludeKeys include(kDistributedKey);
  const KeysOfThread within = keys_of_thread();
  {
    const RestoreKeys restored(before);
    EXPECT_FALSE(is_included(kDistributedKey));
    const RestoreKeys again(within);
    EXPECT_TRUE(is_included(kDistributedKey));
  }
  EXPECT_TRUE(is_included(kDistributedKey));
}

}  // namespace
}  // namespace tessera::detail

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/libtorch_kernels.h"

namespace tessera::detail {

// Canaries: what libtorch's operators are made of.

namespace {

TEST(CompositeKernelsCanary, AreCompositionsStill) {
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

TEST(CompositeKernelsCanary, ComputeAsTheOperators) {
  const at::Tensor x = at::arange(6, at::kFloat).view({2, 3});
  EXPECT_TRUE(at::equal(composite::reshape(x, {3, 2}), x.reshape({3, 2})));
  const at::Tensor classes = at::tensor({0, 2}, at::kLong);
  EXPECT_TRUE(at::equal(composite::one_hot(classes, 3), at::one_hot(classes, 3)));
  at::Tensor out = at::empty({2, 2});
  composite::matmul_out(out, x, x.t());
  EXPECT_TRUE(at::equal(out, x.matmul(x.t())));
  EXPECT_EQ(composite::tensor_split(x, at::tensor({1}, at::kLong), 0).size(), 2u);
}

// Whole numbers: every order of the sums gives the same bits.
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

TEST(RefusedGradientCanary, ThrowsInABackwardAlone) {
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

TEST(ShapesByLibtorchCanary, AreThoseOfConvolutions) {
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

TEST(ShapesByLibtorchCanary, AreThoseOfViews) {
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

// Canaries: dispatch keys that libtorch leaves to others, and which of them a thread has.

int arrived = 0;

/// Counts a call, and sends it on.
template <c10::DispatchKey key>
void note(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ++arrived;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

/// Throws if libtorch has a fallback for the key itself.
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

TEST(LentKeysCanary, AreReachedOnceAThreadIncludesThem) {
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

TEST(LentKeysCanary, HaveThePriorityAtWhichCallsAreSeen) {
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

#include "tessera/kernels/fake_mode.h"
#include "tessera/kernels/detail/fake_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/kernels/detail/fused.h"

namespace tessera::kernels {
namespace {

TEST(FakeMode, InfersSizesAndDtypesWithoutComputing) {
  std::vector<std::string> names;
  const FakeMode fake(c10::DeviceType::CPU,
                      [&](const FakeCall& call) { names.push_back(call.name); });
  const at::Tensor a = at::empty({3, 4}, at::kBFloat16);
  const at::Tensor product = at::mm(a, at::empty({4, 5}, at::kBFloat16));
  EXPECT_EQ(product.sizes(), (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_EQ(names, std::vector<std::string>{"aten::mm"});
  EXPECT_EQ((product.t() + 1).sizes(), (std::vector<std::int64_t>{5, 3}));
  EXPECT_EQ(rms_norm(product, {}, 1e-5).rstd.sizes(), (std::vector<std::int64_t>{3, 1}));
}

TEST(FakeMode, DoesNotDecomposeConvolutionAndLayerNorm) {
  std::vector<std::string> names;
  const FakeMode fake(c10::DeviceType::CPU,
                      [&](const FakeCall& call) { names.push_back(call.name); });
  const at::Tensor images = at::empty({2, 3, 7, 7}), weight = at::empty({5, 3, 3, 3});
  EXPECT_EQ(at::conv2d(images, weight).sizes(), (std::vector<std::int64_t>{2, 5, 5, 5}));
  const auto [normed, mean, rstd] = at::native_layer_norm(images, {7, 7}, {}, {}, 1e-5);
  EXPECT_EQ(normed.sizes(), images.sizes());
  EXPECT_EQ(mean.sizes(), (std::vector<std::int64_t>{2, 3, 1, 1}));
  EXPECT_EQ(names, (std::vector<std::string>{"aten::convolution", "aten::native_layer_norm"}));
}

TEST(FakeMode, ReportsTheKernelsThatRunOnAGpu) {
  std::vector<std::string> names;
  const FakeMode fake(c10::DeviceType::CUDA, [&](const FakeCall& call) {
    names.push_back(call.name);
    EXPECT_EQ(call.arguments.size(), call.inputs.size());
    EXPECT_TRUE(call.arguments.front().isTensor());
  });
  const at::Tensor x = at::empty({3, 2, 2, 4}, at::kBFloat16);
  const at::Tensor table = at::empty({2, 4});
  const at::Tensor rstd = rms_norm(x, x[0][0][0], 1e-5).rstd;
  rms_norm_backward(x, x, x[0][0][0], rstd);
  rotary_embedding(x, table, table, false);
  silu_mul_backward(x, silu_mul(x, x), x);
  silu_mul_with_gradients(x, x, x);
  rotary_embedding_qk(x, x, table, table, false);
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "tessera::rms_norm", "tessera::rms_norm_backward", "tessera::rotary_embedding",
                "tessera::silu_mul", "tessera::silu_mul_backward",
                "tessera::silu_mul_with_gradients", "tessera::rotary_embedding_qk"}));
  names.clear();
  const at::Tensor indices = at::arange(6).view({2, 3});
  const at::Tensor rows = embedding_rows(x.view({12, 4}), indices, 0, 12);
  EXPECT_EQ(rows.sizes(), (std::vector<std::int64_t>{2, 3, 4}));
  EXPECT_EQ(embedding_rows_backward(rows, indices, 3, 5).sizes(),
            (std::vector<std::int64_t>{5, 4}));
  EXPECT_EQ(names, (std::vector<std::string>{"tessera::embedding", "aten::zero_",
                                             "tessera::embedding_backward"}));
}

TEST(FakeMode, DoesNotWriteMemory) {
  const at::Tensor values = at::ones({3});
  {
    const FakeMode fake;
    values.fill_(7).mul_(2).copy_(at::full({3}, 5.0));
  }
  EXPECT_EQ(values.sum().item<float>(), 3);
}

TEST(FakeMode, ComputesIntegersAndReturnsOneForFloats) {
  const FakeMode fake;
  const at::Tensor indices = at::arange(5);
  EXPECT_EQ(indices.sum().item<std::int64_t>(), 10);
  EXPECT_TRUE(indices.lt(5).all().item<bool>());
  EXPECT_EQ(at::empty({}).item<double>(), 1);
  EXPECT_TRUE(in_fake_mode());
}

}  // namespace
}  // namespace tessera::kernels

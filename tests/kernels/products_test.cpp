#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <tuple>

#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/kernels/products.h"
#include "testing/errors.h"

namespace tessera::kernels {
namespace {

namespace libtorch = tessera::detail::libtorch_cpu;

[[maybe_unused]] const bool kAskedFor = (use_fast_products(), true);

// Sizes of products (rows, inner) x (inner, columns). The last three are faster with oneDNN.
struct ProductSizes {
  std::int64_t rows, inner, columns;
};
constexpr std::array<ProductSizes, 7> kSizes = {{{3, 4, 5},
                                                 {0, 8, 8},
                                                 {8, 0, 8},
                                                 {7, 2048, 256},
                                                 {128, 128, 128},
                                                 {257, 131, 67},
                                                 {512, 64, 100}}};

at::Tensor in_double(const at::Tensor& a, const at::Tensor& b) {
  return a.to(at::kDouble).mm(b.to(at::kDouble));
}

/// Compares with a tolerance for fp32 sums of `inner` terms of magnitude 1.
void expect_near(const at::Tensor& found, const at::Tensor& expected, std::int64_t inner) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_EQ(found.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(found.to(at::kDouble), expected, 1e-5, 1e-6 * double(inner + 1)));
}

/// Returns a random matrix; if `transposed`, in column-major order, as in gradients.
at::Tensor matrix(std::int64_t rows, std::int64_t columns, bool transposed) {
  return transposed ? at::randn({columns, rows}).t() : at::randn({rows, columns});
}

class Products : public ::testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  void SetUp() override { at::manual_seed(0); }
  static at::Tensor a(const ProductSizes& s) {
    return matrix(s.rows, s.inner, std::get<0>(GetParam()));
  }
  static at::Tensor b(const ProductSizes& s) {
    return matrix(s.inner, s.columns, std::get<1>(GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(Transposed, Products,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool()));

TEST_P(Products, AgreeWithDoubleAndAddATerm) {
  for (const ProductSizes& s : kSizes) {
    const at::Tensor x = a(s), y = b(s), product = in_double(x, y);
    expect_near(at::mm(x, y), product, s.inner);
    const at::Tensor bias = at::randn({s.columns}), before = at::randn({s.rows, s.columns});
    expect_near(at::addmm(bias, x, y), product + bias, s.inner);
    expect_near(at::addmm(bias, x, y, 0.5, -2), product * -2 + bias * 0.5, s.inner * 2);
    expect_near(before.clone().addmm_(x, y), product + before, s.inner);
    expect_near(before.clone().addmm_(x, y, 0.25, 3), product * 3 + before * 0.25, s.inner * 3);
  }
}

TEST(ProductsOnce, DoNotReadTheTermIfBetaIsZero) {
  const at::Tensor x = at::randn({200, 200});
  const at::Tensor nan = at::full({200, 200}, std::nan(""));
  expect_near(at::addmm(nan, x, x, 0), in_double(x, x), 200);
  expect_near(nan.clone().addmm_(x, x, 0), in_double(x, x), 200);
}

TEST(ProductsOnce, SupportColumnSlices) {
  const at::Tensor wide = at::randn({256, 512});
  const at::Tensor part = wide.narrow(1, 100, 256);
  expect_near(at::mm(part, part), in_double(part, part), 256);
  at::Tensor result = at::zeros({256, 512});
  result.narrow(1, 7, 256).addmm_(part, part);
  expect_near(result.narrow(1, 7, 256), in_double(part, part), 256);
  EXPECT_EQ(result.narrow(1, 0, 7).abs().sum().item<float>(), 0);
}

TEST(ProductsOnce, KeepLibtorchsMessages) {
  for (const std::int64_t size : {300, 2}) {
    EXPECT_THROWN(c10::Error, at::mm(at::zeros({size, 300}), at::zeros({200, size})),
                  "shapes cannot be multiplied");
  }
}

TEST(ProductsOnce, LeaveOtherDtypesToLibtorch) {
  for (const at::ScalarType type : {at::kDouble, at::kBFloat16, at::kComplexFloat}) {
    const at::Tensor x = at::randn({160, 160}, type);
    EXPECT_TRUE(at::equal(at::mm(x, x), libtorch::mm(x, x))) << type;
  }
}

TEST(ProductsOnce, UseLibtorchWithoutOneDnn) {
  const at::Tensor x = at::randn({256, 256});
  const bool before = at::globalContext().userEnabledMkldnn();
  at::globalContext().setUserEnabledMkldnn(false);
  const at::Tensor found = at::mm(x, x);
  at::globalContext().setUserEnabledMkldnn(before);
  EXPECT_TRUE(at::equal(found, libtorch::mm(x, x)));
}

}  // namespace
}  // namespace tessera::kernels

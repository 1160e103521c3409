// Compares roundings to fp8 with a list of all fp8 values, and fp8 products with fp64 products.

#include "tessera/kernels/detail/fused.h"

#include <cmath>
#include <limits>
#include <optional>

#include "kernels/host_kernels.h"
#include "tessera/kernels/fake_mode.h"
#include "testing/distributed.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Returns the value of an fp8 code (0 to 126): four exponent bits (bias 7), three fraction bits.
double value_of_code(int code) {
  const int exponent = code >> 3;
  const double fraction = (code & 7) / 8.0;
  return exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
}

/// Rounds to the nearest fp8 value. Between two values, rounds to the even code.
double rounded(double x) {
  int best = 0;
  for (int code = 1; code < 127; ++code) {
    const double was = std::abs(value_of_code(best) - std::abs(x));
    const double is = std::abs(value_of_code(code) - std::abs(x));
    best = is < was || (is == was && code % 2 == 0) ? code : best;
  }
  return std::copysign(value_of_code(best), x);
}

double least_scale(const at::Tensor& row) {
  const double amax = row.numel() == 0 ? 0 : row.abs().max().item<double>();
  double scale = std::ldexp(1.0, -100);
  while (amax > 448 * scale) {
    scale *= 2;
  }
  return scale;
}

/// Returns x, quantized row by row and dequantized, computed in fp64. x must be finite.
at::Tensor expected_values(const at::Tensor& x) {
  at::Tensor result = x.to(at::kDouble).clone();
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    const double scale = least_scale(result[row]);
    for (std::int64_t column = 0; column < x.size(1); ++column) {
      result[row][column].fill_(scale * rounded(result[row][column].item<double>() / scale));
    }
  }
  return result;
}

at::Tensor in_fp64(const Fp8Rows& rows) {
  return rows.values.to(at::kDouble) * rows.scales.to(at::kDouble);
}

/// Returns random values that differ by factors up to 2^24 within a row, and more between rows.
at::Tensor wide_values(std::int64_t rows, std::int64_t columns) {
  const at::Tensor exponents =
      uniform_values({rows, columns}, 3, 12.0) + uniform_values({rows, 1}, 4, 60.0);
  return normal_values({rows, columns}, 5) * at::exp2(exponents);
}

TEST(QuantizeFp8, RoundsToNearestWithTheSmallestScale) {
  const at::Tensor wide = wide_values(5, 37);
  const at::Tensor edges = at::tensor({448.0, 449.0, 447.9, 464.0, 0.001953125, 0.0009765625, 224.0,
                                       232.0, -17.0, -19.0, 0.0, 1e-30})
                               .to(at::kFloat)
                               .view({12, 1})
                               .matmul(at::tensor({1.0f, 0.3f}).view({1, 2}));
  for (const at::Tensor& x :
       {wide, wide.to(at::kBFloat16), wide.to(at::kDouble), edges, edges.t(), wide.t(),
        wide.narrow(1, 1, 9), at::full({1, 3}, 3.4e38), at::full({1, 3}, 1e-40)}) {
    const Fp8Rows rows = quantize_fp8(x);
    EXPECT_EQ(rows.values.scalar_type(), at::kFloat8_e4m3fn);
    EXPECT_TRUE(rows.values.is_contiguous());
    EXPECT_EQ(rows.scales.sizes(), (std::vector<std::int64_t>{x.size(0), 1}));
    EXPECT_TRUE(in_fp64(rows).equal(expected_values(x))) << x;
  }
}

TEST(QuantizeFp8, KeepsZerosAndMakesNonfiniteRowsNaN) {
  const at::Tensor x =
      at::tensor({0.0, 0.0, 1.0, kInfinity, -kInfinity, 1.0, kNaN, 2.0, 3.0, -0.0}).view({5, 2});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor y = in_fp64(quantize_fp8(x.to(type)));
    EXPECT_TRUE(y[0].eq(0).all().item<bool>());
    EXPECT_TRUE(y.narrow(0, 1, 3).isnan().all().item<bool>());
    EXPECT_TRUE(y[4].equal(x[4].to(at::kDouble)));
    const at::Tensor product = fp8_linear(x.to(type), at::ones({3, 2}, type));
    EXPECT_TRUE(product[0].eq(0).all().item<bool>());
    EXPECT_TRUE(product.narrow(0, 1, 3).isnan().all().item<bool>());
    EXPECT_TRUE(product[4].eq(3).all().item<bool>());
  }
}

TEST(QuantizeFp8, AcceptsEmptyMatrices) {
  EXPECT_EQ(quantize_fp8(at::zeros({3, 0})).scales.size(0), 3);
  EXPECT_EQ(quantize_fp8(at::zeros({0, 3})).scales.size(0), 0);
  EXPECT_TRUE(fp8_linear(at::zeros({2, 0}), at::zeros({3, 0})).equal(at::zeros({2, 3})));
  EXPECT_TRUE(
      fp8_linear_weight_grad(at::zeros({0, 3}), at::zeros({0, 2})).equal(at::zeros({3, 2})));
}

/// Clears the signs of NaNs, because the sign of a NaN is unspecified.
at::Tensor codes_of(const Fp8Rows& rows) {
  const at::Tensor codes = rows.values.view(at::kByte);
  const at::Tensor magnitudes = codes.remainder(128);
  return at::where(magnitudes.eq(127), magnitudes, codes);
}

TEST(QuantizeFp8, HasTheSameBitsOnDevice) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& sizes : {std::vector<std::int64_t>{3, 64}, {2, 1}, {5, 37}, {130, 72}}) {
      for (const double scale : {1.0, 1e-3, 1e4}) {
        const at::Tensor x = normal_values(sizes, 7).mul(scale).to(type);
        x[0][0].fill_(scale == 1.0 ? kNaN : scale > 1 ? kInfinity : 0.0);
        for (const at::Tensor& matrix : {x, x.t(), x.narrow(0, 1, 1)}) {
          const Fp8Rows expected = quantize_fp8(matrix);
          const KernelsOnHost kernels;
          const Fp8Rows found = quantize_fp8(matrix);
          EXPECT_TRUE(found.scales.equal(expected.scales)) << matrix.sizes() << " " << scale;
          EXPECT_TRUE(codes_of(found).equal(codes_of(expected))) << matrix.sizes() << " " << scale;
        }
      }
    }
  }
}

TEST(QuantizeFp8, MultipliesColumnsByFactors) {
  const at::Tensor factors = at::arange(32).remainder(7).sub(3).to(at::kFloat).exp2().unsqueeze(0);
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = normal_values({3, 32}, 5).to(type);
    const Fp8Rows expected = quantize_fp8(x * factors.to(type));
    for (const bool on_device : {false, true}) {
      std::optional<KernelsOnHost> kernels;
      if (on_device) {
        kernels.emplace();
      }
      const Fp8Rows found = quantize_fp8(x, factors);
      EXPECT_TRUE(found.scales.equal(expected.scales)) << type << on_device;
      EXPECT_TRUE(codes_of(found).equal(codes_of(expected))) << type << on_device;
    }
  }
}

struct Sizes {
  std::int64_t rows, in, out;
};

class Fp8Products : public ::testing::TestWithParam<Sizes> {
 protected:
  at::Tensor x = normal_values({GetParam().rows, GetParam().in}, 1);
  at::Tensor weight = normal_values({GetParam().out, GetParam().in}, 2) * 0.05;
  at::Tensor grad = normal_values({GetParam().rows, GetParam().out}, 3) * 1e-6;
};

/// Expects y = a b. The tolerance is the rounding error of fp32 sums with `terms` terms.
void expect_exact(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  std::int64_t terms) {
  const at::Tensor bound =
      a.abs().matmul(b.abs()) * (static_cast<double>(terms + 2) * std::ldexp(1.0, -24));
  EXPECT_TRUE((y.to(at::kDouble) - a.matmul(b)).abs().le(bound).all().item<bool>());
}

TEST_P(Fp8Products, SumTheQuantizedValues) {
  const Fp8Rows w = quantize_fp8(weight);
  expect_exact(fp8_linear(x, weight), in_fp64(quantize_fp8(x)), in_fp64(w).t(), x.size(1));
  // The input gradient reuses the fp8 weight of forward: `grad` is multiplied by the weight's
  // scales, and the product is quantized.
  expect_exact(fp8_linear_input_grad(grad, weight), in_fp64(quantize_fp8(grad * w.scales.t())),
               w.values.to(at::kDouble), grad.size(1));
  // The weight gradient needs `grad` and x quantized by columns, not by rows.
  expect_exact(fp8_linear_weight_grad(grad, x), in_fp64(quantize_fp8(grad.t())),
               in_fp64(quantize_fp8(x.t())).t(), x.size(0));
}

TEST_P(Fp8Products, OfBf16AreRoundedOnce) {
  const at::Tensor half_x = x.to(at::kBFloat16), half_weight = weight.to(at::kBFloat16);
  EXPECT_TRUE(
      fp8_linear(half_x, half_weight)
          .equal(fp8_linear(half_x.to(at::kFloat), half_weight.to(at::kFloat)).to(at::kBFloat16)));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Fp8Products,
                         ::testing::Values(Sizes{32, 64, 48}, Sizes{7, 33, 5}, Sizes{1, 1, 1},
                                           Sizes{3, 500, 2}));

TEST(Fp8Linear, KeepsLeadingDimensions) {
  const at::Tensor x = normal_values({2, 3, 8}, 1), weight = normal_values({4, 8}, 2);
  const at::Tensor y = fp8_linear(x, weight);
  EXPECT_EQ(y.sizes(), (std::vector<std::int64_t>{2, 3, 4}));
  EXPECT_TRUE(y.view({6, 4}).equal(fp8_linear(x.view({6, 8}), weight)));
  EXPECT_EQ(fp8_linear_input_grad(y, weight).sizes(), x.sizes());
  EXPECT_EQ(fp8_linear_weight_grad(y, x).sizes(), weight.sizes());
  EXPECT_TRUE(fp8_linear(x[0][0], weight).equal(y[0][0]));
}

/// On a GPU, fp8_linear calls libtorch's _scaled_mm, which needs inner sizes divisible by 16.
TEST(Fp8Linear, CallsScaledMmOnAGpu) {
  std::vector<std::vector<std::int64_t>> factors;
  const at::Tensor x = at::zeros({5, 32}, at::kBFloat16),
                   weight = at::zeros({48, 32}, at::kBFloat16);
  const FakeMode fake(c10::DeviceType::CUDA, [&](const FakeCall& call) {
    if (call.name == "aten::_scaled_mm") {
      factors.push_back(call.inputs[0].sizes().vec());
      factors.push_back(call.inputs[1].sizes().vec());
    }
  });
  const at::Tensor y = fp8_linear(x, weight);
  EXPECT_EQ(y.sizes(), (std::vector<std::int64_t>{5, 48}));
  EXPECT_EQ(fp8_linear_input_grad(y, weight).sizes(), x.sizes());
  EXPECT_EQ(fp8_linear_weight_grad(y, x).sizes(), weight.sizes());
  const std::vector<std::vector<std::int64_t>> expected{{5, 32},  {32, 48}, {5, 48},
                                                        {48, 32}, {48, 16}, {16, 32}};
  EXPECT_EQ(factors, expected);
}

TEST(Fp8Linear, RefusesInvalidCalls) {
  const at::Tensor half = at::ones({16, 16}, at::kHalf);
  EXPECT_ERROR(fp8_linear(half, half), "fp16", "use bf16 or fp32");
  EXPECT_ERROR(fp8_linear_input_grad(half, half), "fp16", "use bf16 or fp32");
  const FakeMode fake(c10::DeviceType::CUDA);
  const auto zeros = [](std::int64_t rows, std::int64_t columns) {
    return at::empty({rows, columns}, at::kBFloat16);
  };
  EXPECT_ERROR(fp8_linear(zeros(4, 24), zeros(16, 24)), "a matrix of sizes [16, 24]",
               "must be multiples of 16");
  EXPECT_ERROR(fp8_linear(zeros(4, 16).to(at::kFloat), zeros(16, 16).to(at::kFloat)),
               "is not supported on CUDA; use bf16");
}

}  // namespace
}  // namespace tessera::kernels

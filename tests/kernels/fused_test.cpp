#include "tessera/kernels/detail/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "kernels/host_kernels.h"
#include "rows/row_kernels.h"
#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera::kernels {
namespace {

// Tests fused kernels against ATen's operators and autograd in fp64, on equal (rounded) inputs.

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::randn(sizes, at::kDouble).to(type);
}

at::Tensor leaf(const at::Tensor& x) {
  return x.to(at::kDouble).detach().requires_grad_();
}

/// A dtype's largest rounding error: `relative` times the absolute value, but at least `least`.
struct Rounding {
  double relative, least;
};

Rounding rounding_of(at::ScalarType type) {
  return type == at::kBFloat16 ? Rounding{0x1.01p-8, 0x1p-134}
         : type == at::kHalf   ? Rounding{0x1.01p-11, 0x1p-25}
                               : Rounding{0, 0};
}

/// Expects |a - b| <= (rounding error of the dtype of a) + `arithmetic` * max |b|.
void expect_close(const at::Tensor& a, const at::Tensor& b, double arithmetic = 0) {
  ASSERT_EQ(a.sizes(), b.sizes());
  if (b.numel() == 0) {
    return;
  }
  if (arithmetic == 0) {
    arithmetic = a.scalar_type() == at::kDouble  ? 1e-12
                 : a.scalar_type() == at::kFloat ? 2e-6
                                                 : 1e-5;
  }
  const Rounding rounding = rounding_of(a.scalar_type());
  const double largest = b.abs().max().item<double>();
  const at::Tensor allowed =
      b.abs().mul(rounding.relative).add(rounding.least + arithmetic * largest);
  EXPECT_TRUE((a.to(at::kDouble) - b).abs().le(allowed).all().item<bool>()) << a << b;
}

at::Tensor composed_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * (x * x).mean(-1, true).add(eps).rsqrt() * weight;
}

at::Tensor composed_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos.unsqueeze(1) + at::cat({-halves[1], halves[0]}, -1) * sin.unsqueeze(1);
}

class Fused : public EachForm {};

TEST_P(Fused, RmsNormAgreesWithAutograd) {
  for (const auto& sizes :
       {std::vector<std::int64_t>{5, 48}, {3, 2, 37}, {40, 16}, {1, 7}, {0, 8}}) {
    for (const at::Tensor& weight : {random({sizes.back()}, type()), at::Tensor()}) {
      const at::Tensor x = random(sizes, type());
      const at::Tensor grad = random(sizes, type());
      const at::Tensor x0 = leaf(x);
      const at::Tensor w0 = leaf(weight.defined() ? weight : at::ones({sizes.back()}));
      const at::Tensor y0 = composed_rms_norm(x0, w0, 1e-5);
      y0.backward(grad.to(at::kDouble));
      const RmsNormResult y = rms_norm(x, weight, 1e-5);
      const auto [x_grad, weight_grad] = rms_norm_backward(grad, x, weight, y.rstd);
      EXPECT_EQ(y.out.scalar_type(), type());
      expect_close(y.out, y0);
      expect_close(x_grad, x0.grad());
      ASSERT_EQ(weight_grad.defined(), weight.defined());
      if (weight.defined()) {
        expect_close(weight_grad, w0.grad());
      }
    }
  }
}

/// Tests rows whose squares overflow or underflow in the element type.
TEST_P(Fused, RmsNormSupportsHugeAndTinyElements) {
  const double largest = type() == at::kHalf ? 8e3 : type() == at::kDouble ? 1e100 : 4e37;
  for (const double scale : {1e-6, largest}) {
    const at::Tensor x = random({3, 37}, at::kDouble).mul(scale).to(type());
    const at::Tensor grad = random({3, 37}, type());
    const at::Tensor x0 = leaf(x);
    const at::Tensor y0 = composed_rms_norm(x0, at::ones({37}, at::kDouble), 1e-5);
    y0.backward(grad.to(at::kDouble));
    const RmsNormResult y = rms_norm(x, {}, 1e-5);
    expect_close(y.out, y0, 1e-5);
    expect_close(rms_norm_backward(grad, x, {}, y.rstd).first, x0.grad(), 1e-5);
  }
}

TEST_P(Fused, RmsNormKeepsNaNAndInfinityInTheirRow) {
  for (const double odd : {NAN, INFINITY}) {
    const at::Tensor x = random({2, 16}, type());
    x[0][3].fill_(odd);
    const at::Tensor y = rms_norm(x, {}, 1e-5).out;
    EXPECT_TRUE(y[0][3].isnan().item<bool>());
    EXPECT_TRUE(y[1].isfinite().all().item<bool>());
  }
}

/// Expects bitwise equal tensors. fp64 may differ: ATen's rounding depends on element positions.
void expect_same(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_TRUE(a.scalar_type() == at::kDouble ? a.allclose(b, 1e-14, 1e-15) : a.equal(b));
}

TEST_P(Fused, AddRmsNormEqualsTwoOperations) {
  for (const auto& sizes :
       {std::vector<std::int64_t>{5, 48}, {3, 2, 37}, {300, 16}, {1, 7}, {0, 8}}) {
    const at::Tensor x = random(sizes, type()), residual = random(sizes, type()),
                     grad = random(sizes, type()), sum_grad = random(sizes, type());
    const at::Tensor sum = x + residual;
    for (const at::Tensor& weight : {random({sizes.back()}, type()), at::Tensor()}) {
      const RmsNormResult expected = rms_norm(sum, weight, 1e-5);
      const AddRmsNormResult found = add_rms_norm(x, residual, weight, 1e-5);
      expect_same(found.sum, sum);
      expect_same(found.out, expected.out);
      expect_same(found.rstd, expected.rstd);
      const auto [alone, weight_alone] = rms_norm_backward(grad, sum, weight, found.rstd);
      const auto [both, weight_grad] = rms_norm_backward(grad, sum, weight, found.rstd, sum_grad);
      expect_same(both, alone + sum_grad);
      EXPECT_EQ(weight_grad.defined(), weight.defined());
      if (weight.defined()) {
        expect_same(weight_grad, weight_alone);
      }
    }
  }
}

TEST_P(Fused, AddRmsNormSupportsStridedTensors) {
  const at::Tensor x = random({37, 24}, type()).t();
  const at::Tensor residual = random({24 * 37 + 1}, type()).narrow(0, 1, 24 * 37).view({24, 37});
  const at::Tensor weight = random({37});
  const AddRmsNormResult found = add_rms_norm(x, residual, weight, 1e-5);
  expect_same(found.sum, x + residual);
  expect_same(found.out, rms_norm((x + residual).contiguous(), weight, 1e-5).out);
  const auto dense = rms_norm_backward(x.contiguous(), found.sum, weight, found.rstd, residual);
  expect_same(rms_norm_backward(x, found.sum, weight, found.rstd, residual).first, dense.first);
}

TEST_P(Fused, SiluMulAgreesWithAutograd) {
  for (const std::int64_t n : {0, 1, 15, 16, 50'000}) {
    const at::Tensor gate = random({n}, type()) * 4;
    const at::Tensor up = random({n}, type());
    const at::Tensor grad = random({n}, type());
    const at::Tensor g0 = leaf(gate);
    const at::Tensor u0 = leaf(up);
    const at::Tensor y0 = at::silu(g0) * u0;
    y0.backward(grad.to(at::kDouble));
    const auto [gate_grad, up_grad] = silu_mul_backward(grad, gate, up);
    expect_close(silu_mul(gate, up), y0);
    expect_close(gate_grad, g0.grad());
    expect_close(up_grad, u0.grad());
    const auto [product, of_gate, of_up] = silu_mul_with_gradients(grad, gate, up);
    expect_same(product, silu_mul(gate, up));
    expect_same(of_gate, gate_grad);
    expect_same(of_up, up_grad);
  }
}

TEST_P(Fused, SiluMulSupportsHalvesOfOneTensor) {
  for (const std::int64_t n : {0, 1, 15, 16, 300}) {
    const at::Tensor both = random({3, 37, 2 * n}, type()) * 2;
    const at::Tensor grad = random({3, 37, n}, type());
    const auto halves = both.split_with_sizes({n, n}, -1);
    const at::Tensor gate = halves[0].contiguous(), up = halves[1].contiguous();
    const at::Tensor expected = silu_mul(gate, up);
    const auto [gate_grad, up_grad] = silu_mul_backward(grad, gate, up);
    expect_same(silu_mul(halves[0], halves[1]), expected);
    expect_same(silu_mul_backward(grad, halves[0], halves[1]).second, up_grad);
    expect_same(std::get<0>(silu_mul_with_gradients(grad, halves[0], halves[1])), expected);
  }
}

// One call that rotates queries and keys must give the same bits as two calls, for any strides.
TEST_P(Fused, RotaryOfQueriesAndKeysEqualsTwoCalls) {
  const at::Tensor cos = random({5, 16}), sin = random({5, 16});
  const at::Tensor q = random({2, 6, 5, 16}, type()).transpose(1, 2),
                   k = random({2, 5, 3, 16}, type());
  for (const bool transposed : {false, true}) {
    const auto [q_out, k_out] = rotary_embedding_qk(q, k, cos, sin, transposed);
    EXPECT_TRUE(q_out.equal(rotary_embedding(q, cos, sin, transposed)));
    EXPECT_TRUE(k_out.equal(rotary_embedding(k, cos, sin, transposed)));
    EXPECT_TRUE(q_out.equal(rotary_embedding(q.contiguous(), cos, sin, transposed)));
  }
}

TEST_P(Fused, RotaryAgreesWithAutograd) {
  for (const std::int64_t dim : {2, 20, 64}) {
    const at::Tensor x = random({2, 5, 3, dim}, type()), grad = random({2, 5, 3, dim}, type());
    const at::Tensor cos = random({5, dim}), sin = random({5, dim});
    const at::Tensor x0 = leaf(x);
    const at::Tensor y0 = composed_rotary(x0, cos.to(at::kDouble), sin.to(at::kDouble));
    y0.backward(grad.to(at::kDouble));
    expect_close(rotary_embedding(x, cos, sin, false), y0);
    expect_close(rotary_embedding(grad, cos, sin, true), x0.grad());
  }
}

TEST_P(Fused, EmbeddingAgreesWithAutograd) {
  for (const auto& [count, dim] :
       {std::pair<std::int64_t, std::int64_t>{1, 16}, {33, 8}, {52, 9}, {700, 8}}) {
    const at::Tensor weight = random({11, dim}, type());
    // Every third index is 4, so that a GPU sums the gradient of row 4 in several parts.
    const at::Tensor indices =
        at::randint(0, 11, {count, 1}, at::kLong)
            .masked_fill(at::arange(count).remainder(3).eq(0).unsqueeze(1), 4);
    const at::Tensor grad = random({count, 1, dim}, type());
    const at::Tensor w0 = leaf(weight);
    at::embedding(w0, indices).backward(grad.to(at::kDouble));
    EXPECT_TRUE(embedding_rows(weight, indices, 0, 11).equal(at::embedding(weight, indices)));
    expect_close(embedding_rows_backward(grad, indices, 0, 11), w0.grad());
  }
}

TEST_P(Fused, PartsOfAnEmbeddingSumToTheWhole) {
  const at::Tensor weight = random({11, 9}, type());
  const at::Tensor indices = at::randint(0, 11, {17}, at::kLong);
  const at::Tensor grad = random({17, 9}, type());
  at::Tensor sum = at::zeros({17, 9}, type());
  std::vector<at::Tensor> grads;
  for (const auto& [first, rows] : {std::pair<std::int64_t, std::int64_t>{0, 4}, {4, 7}, {11, 0}}) {
    sum += embedding_rows(weight.narrow(0, first, rows), indices, first, 11);
    grads.push_back(embedding_rows_backward(grad, indices, first, rows));
  }
  EXPECT_TRUE(sum.equal(at::embedding(weight, indices)));
  EXPECT_TRUE(at::cat(grads).equal(embedding_rows_backward(grad, indices, 0, 11)));
}

INSTANTIATE_EACH_FORM(Fused);

class SiluMul : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OnDevice, SiluMul, ::testing::Bool());

TEST_P(SiluMul, IsFiniteForLargeInputsAndKeepsNaN) {
  std::optional<KernelsOnHost> kernels;
  if (GetParam()) {
    kernels.emplace();
  }
  const at::Tensor large = at::tensor({-1000.0F, -88.0F, 0.0F, 88.0F, 1000.0F});
  const at::Tensor y = silu_mul(large, at::ones({5}));
  EXPECT_TRUE(y.allclose(at::tensor({0.0F, 0.0F, 0.0F, 88.0F, 1000.0F}), 1e-6, 1e-30));
  const at::Tensor gate = at::tensor({-1e38, -3e38, -1e30, -200.0}, at::kFloat);
  const at::Tensor up = at::full({4}, 1.5, at::kFloat);
  EXPECT_TRUE(at::equal(silu_mul(gate, up), at::zeros({4})));
  const auto [of_gate, of_up] = silu_mul_backward(at::ones({4}), gate, up);
  EXPECT_TRUE(at::equal(of_gate, at::zeros({4})) && at::equal(of_up, at::zeros({4})));
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor nan = silu_mul(at::full({20}, NAN, type), at::ones({20}, type));
    EXPECT_TRUE(nan.isnan().all().item<bool>());
  }
}

TEST(FusedOperators, RefuseNonFloatingPointTensors) {
  for (const auto type : {at::kLong, at::kComplexFloat}) {
    const at::Tensor x = at::ones({2, 8}, type), tables = at::ones({2, 8});
    EXPECT_ERROR(silu_mul(x, x), "operator for floating-point tensors", "convert the tensor");
    EXPECT_ERROR(rms_norm(x, {}, 1e-5), "operator for floating-point tensors");
    EXPECT_ERROR(rotary_embedding(x.view({1, 2, 1, 8}), tables, tables, false),
                 "operator for floating-point tensors");
  }
}

TEST(Embedding, NamesAnIndexOutOfRange) {
  EXPECT_ERROR(embedding_rows(at::ones({4, 2}), at::tensor({0, 4}, at::kLong), 0, 4),
               "index 4 at position 1 is not a row of a table of 4 rows");
  EXPECT_ERROR(embedding_rows(at::ones({4, 2}), at::tensor({-1}, at::kLong), 0, 4),
               "index -1 at position 0 is not a row of a table of 4 rows");
}

// The row kernels of this machine must give the same bits as the baseline row kernels.
TEST(RowKernels, AgreeBetweenInstructionSets) {
  const at::Tensor gate = at::randn({1003}) * 5, up = at::randn({1003});
  const auto* x = gate.const_data_ptr<float>();
  const auto* y = up.const_data_ptr<float>();
  const auto run = [&](const RowKernelTable& table) {
    const at::Tensor all = at::zeros({5, 1003});
    const auto row = [&](std::int64_t i) { return all[i].data_ptr<float>(); };
    const at::Tensor sums = at::empty({1003});
    table.fp32.silu_mul(x, y, row(0), 1003);
    table.fp32.rms_norm(x, y, nullptr, sums.data_ptr<float>(), row(1), row(2), 17, 59, 1e-5F);
    table.fp32.rms_norm_backward(x, nullptr, y, nullptr, row(2), row(3), row(4), 17, 59);
    return all;
  };
  EXPECT_TRUE(run(row_kernels()).equal(run(baseline::kTable)));
}

TEST(RmsNorm, DoesNotDependOnTheNumberOfThreads) {
  const at::Tensor x = at::randn({1000, 64});
  const at::Tensor weight = at::randn({64});
  const RmsNormResult y = rms_norm(x, weight, 1e-5);
  const int threads = at::get_num_threads();
  at::set_num_threads(4);
  const auto many = rms_norm_backward(x, x, weight, y.rstd);
  at::set_num_threads(1);
  const auto one = rms_norm_backward(x, x, weight, y.rstd);
  at::set_num_threads(threads);
  EXPECT_TRUE(many.second.equal(one.second));
  EXPECT_TRUE(many.first.equal(one.first));
}

}  // namespace
}  // namespace tessera::kernels

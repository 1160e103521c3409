// Results on a GPU compared with the CPU: random numbers bit by bit, the functions of nn and
// attention within rounding.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/causal_attention.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/functional.h"

namespace tessera::nn {
namespace {

constexpr RandomKey kKey{42, 7};

class WithCuda : public ::testing::Environment {
 public:
  /// Loads the library that needs CUDA.
  void SetUp() override { streams_ = comm::make_streams(c10::Device(c10::kCUDA, 0)); }
  void TearDown() override { streams_.reset(); }

 private:
  comm::StreamsPtr streams_;
};
const ::testing::Environment* const kWithCuda = ::testing::AddGlobalTestEnvironment(new WithCuda);

struct Fill {
  const char* name;
  std::function<void(const at::Tensor&)> fill;
};
std::ostream& operator<<(std::ostream& out, const Fill& fill) {
  return out << fill.name;
}

class RandomNumbers : public ::testing::TestWithParam<Fill> {};

// Odd sizes, so that the last block of threads is not full.
TEST_P(RandomNumbers, AreTheCpusBits) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& sizes : {std::vector<std::int64_t>{1}, {777, 131}, {0, 4}, {3, 1, 5}}) {
      const at::Tensor on_cpu = at::zeros(sizes, type);
      const at::Tensor on_gpu = at::zeros(sizes, at::TensorOptions(at::kCUDA).dtype(type));
      GetParam().fill(on_cpu);
      GetParam().fill(on_gpu);
      EXPECT_TRUE(at::equal(on_gpu.cpu(), on_cpu)) << type << " " << on_cpu.sizes();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , RandomNumbers,
    ::testing::Values(Fill{"uniform", [](const at::Tensor& x) { uniform_(x, -1, 3, kKey); }},
                      Fill{"normal", [](const at::Tensor& x) { normal_(x, 0.5, 2, kKey); }},
                      Fill{"truncated",
                           [](const at::Tensor& x) { trunc_normal_(x, 0, 1, -2, 1, kKey); }},
                      Fill{"bernoulli", [](const at::Tensor& x) { bernoulli_(x, 0.3, kKey); }}),
    [](const auto& info) { return info.param.name; });

TEST(Dropout, DropsWhatTheCpuDrops) {
  const at::Tensor x = at::arange(1, 1002, at::kFloat);
  const at::Tensor dropped = dropout(x, 0.3, kKey);
  EXPECT_TRUE(at::equal(dropout(x.cuda(), 0.3, kKey).cpu(), dropped));
}

struct Function {
  const char* name;
  std::vector<std::vector<std::int64_t>> inputs;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> call;
};
std::ostream& operator<<(std::ostream& out, const Function& function) {
  return out << function.name;
}

class Functions : public ::testing::TestWithParam<Function> {};

/// The result of `call` and the gradients of its inputs, on the CPU in fp64.
std::vector<at::Tensor> results_of(const Function& function, const std::vector<at::Tensor>& inputs,
                                   const at::TensorOptions& where) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.to(where).detach().requires_grad_());
  }
  const at::Tensor out = function.call(leaves);
  out.backward(at::linspace(-1, 1, out.numel(), at::kDouble).view(out.sizes()).to(where));
  std::vector<at::Tensor> results{out.detach()};
  for (const at::Tensor& leaf : leaves) {
    results.push_back(leaf.grad());
  }
  for (at::Tensor& result : results) {
    result = result.to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
  }
  return results;
}

TEST_P(Functions, AreTheCpusWithinRounding) {
  at::manual_seed(3);
  nn::allow_math_attention(true);  // only the math kernel computes in fp64
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const double tolerance = type == at::kDouble ? 1e-10 : type == at::kFloat ? 1e-4 : 3e-2;
    std::vector<at::Tensor> inputs;
    for (const auto& sizes : GetParam().inputs) {
      inputs.push_back(at::randn(sizes, at::kDouble).to(type));
    }
    const auto expected = results_of(GetParam(), inputs, at::TensorOptions().dtype(at::kDouble));
    const auto found =
        results_of(GetParam(), inputs, at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(type));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double scale = expected[i].abs().max().item<double>();
      const double difference = (found[i] - expected[i]).abs().max().item<double>();
      EXPECT_LE(difference, tolerance * scale)
          << type << (i == 0 ? ", the result" : ", gradient of input " + std::to_string(i - 1));
    }
  }
}

constexpr double kQuarter = 1.5707963267948966;

/// (sequence, width) of cosines or sines.
at::Tensor table(const at::Tensor& like, double phase) {
  const auto options = at::TensorOptions(like.device()).dtype(at::kDouble);
  const at::Tensor angles = at::arange(like.size(1), options)
                                .outer(at::arange(like.size(3) / 2, options).add(1).reciprocal());
  return at::cat({angles, angles}, 1).add(phase).cos().to(like.scalar_type());
}

at::Tensor turned_queries_and_keys(const std::vector<at::Tensor>& x) {
  const auto [q, k] = rotary_embedding(x[0], x[1], table(x[0], 0), table(x[0], -kQuarter));
  return at::cat({q, k}, 2);
}

INSTANTIATE_TEST_SUITE_P(
    , Functions,
    ::testing::Values(
        Function{"rms_norm",
                 {{5, 3, 129}, {129}},
                 [](const auto& x) { return nn::rms_norm(x[0], x[1], 1e-5); }},
        Function{"add_rms_norm",
                 {{5, 3, 129}, {5, 3, 129}, {129}},
                 [](const auto& x) {
                   const auto [normed, sum] = nn::add_rms_norm(x[0], x[1], x[2], 1e-5);
                   return normed + sum;
                 }},
        // Sizes whose rows are accessed by 16 bytes: rows of a warp and of a block, with and
        // without a remainder.
        Function{"rms_norm_of_a_warp",
                 {{300, 2048}, {2048}},
                 [](const auto& x) { return nn::rms_norm(x[0], x[1], 1e-5); }},
        Function{"add_rms_norm_of_a_block",
                 {{70, 3080}, {70, 3080}, {3080}},
                 [](const auto& x) {
                   const auto [normed, sum] = nn::add_rms_norm(x[0], x[1], x[2], 1e-5);
                   return normed + sum;
                 }},
        // Backward does not fit the sums of this size into shared memory.
        Function{"rms_norm_of_16384",
                 {{5, 16384}, {16384}},
                 [](const auto& x) { return nn::rms_norm(x[0], x[1], 1e-5); }},
        Function{
            "silu_mul", {{7, 131}, {7, 131}}, [](const auto& x) { return silu_mul(x[0], x[1]); }},
        Function{"rotary_embedding",
                 {{2, 5, 3, 8}},
                 [](const auto& x) {
                   return rotary_embedding(x[0], table(x[0], 0), table(x[0], -kQuarter));
                 }},
        Function{"rotary_embedding_of_two", {{2, 5, 4, 8}, {2, 5, 2, 8}}, &turned_queries_and_keys},
        Function{"rotary_embedding_of_many_heads",
                 {{2, 50, 20, 64}, {2, 50, 5, 64}},
                 &turned_queries_and_keys},
        Function{"embedding",
                 {{13, 9}},
                 [](const auto& x) {
                   const at::Tensor ids = at::arange(30, at::kLong).remainder(11).view({3, 10});
                   return nn::embedding(x[0], ids.to(x[0].device()));
                 }},
        // The sum of the most frequent row uses several blocks.
        Function{"embedding_of_frequent_rows",
                 {{40, 64}},
                 [](const auto& x) {
                   const at::Tensor ids = at::arange(700, at::kLong).square().remainder(40);
                   return nn::embedding(x[0], ids.to(x[0].device()));
                 }},
        Function{"cross_entropy",
                 {{33, 20001}},
                 [](const auto& x) {
                   const at::Tensor targets = at::arange(33, at::kLong).mul(597).sub(100);
                   return tessera::detail::cross_entropy(x[0], targets.to(x[0].device()),
                                                         {-100, 0.1, 0.01})
                       .to(x[0].scalar_type());
                 }},
        Function{"causal_attention",
                 {{2, 4, 33, 16}, {2, 2, 33, 16}, {2, 2, 33, 16}},
                 [](const auto& x) { return attention(x[0], x[1], x[2], true); }},
        Function{"attention_in_a_window",
                 {{1, 2, 20, 8}, {1, 2, 20, 8}, {1, 2, 20, 8}},
                 [](const auto& x) {
                   return attention(x[0], x[1], x[2], false,
                                    detail::causal_mask(20, 5, x[0].device()));
                 }}),
    [](const auto& info) { return info.param.name; });

/// FSDP pre-loads the accumulated gradient: the product is added to it without a rounding to bf16.
TEST(LinearProduct, AddsToAnFp32GradientOfABf16Weight) {
  const auto on_gpu = at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(at::kBFloat16);
  at::manual_seed(4);
  const at::Tensor weight = at::randn({48, 64}, on_gpu).requires_grad_();
  const at::Tensor x = at::randn({3, 11, 64}, on_gpu), gradient = at::randn({3, 11, 48}, on_gpu);
  const at::Tensor before = at::randn({48, 64}, on_gpu.dtype(at::kFloat));
  weight.mutable_grad() = before.clone();
  detail::linear_product(x, weight, {}).backward(gradient);
  const at::Tensor expected =
      before.to(at::kDouble) +
      gradient.flatten(0, 1).t().to(at::kDouble).mm(x.flatten(0, 1).to(at::kDouble));
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(weight.grad().to(at::kDouble), expected, 1e-5, 1e-4));
}

}  // namespace
}  // namespace tessera::nn

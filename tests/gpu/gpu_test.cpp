// Compares results on a GPU and on the CPU. Random numbers, and kernels with the same formula in
// the same order, must be bitwise equal; other functions within rounding.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/comm/detail/streams.h"
#include "tessera/dtensor/detail/experts.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/random.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/kernels/detail/lists.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/functional.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::nn {
namespace {

constexpr RandomKey kKey{42, 7};

class WithCuda : public ::testing::Environment {
 public:
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

// Sizes are odd, so that the last block of threads is not full.
TEST_P(RandomNumbers, EqualTheCpusBitForBit) {
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

TEST(Dropout, DropsTheSameElementsOnCpuAndGpu) {
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

/// Returns the results of `function` and the gradients of its inputs, copied to the CPU as fp64.
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

TEST_P(Functions, EqualTheCpuUpToRounding) {
  at::manual_seed(3);
  nn::allow_math_attention(true);  // libtorch's only fp64 attention kernel
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
        // Rows are so long that threads read 16 bytes at a time. The last read of some rows has
        // less than 16 bytes.
        Function{"rms_norm_of_a_warp",
                 {{300, 2048}, {2048}},
                 [](const auto& x) { return nn::rms_norm(x[0], x[1], 1e-5); }},
        Function{"add_rms_norm_of_a_block",
                 {{70, 3080}, {70, 3080}, {3080}},
                 [](const auto& x) {
                   const auto [normed, sum] = nn::add_rms_norm(x[0], x[1], x[2], 1e-5);
                   return normed + sum;
                 }},
        // The row is so long that the sums of backward do not fit into shared memory.
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
        // Many of the 700 ids are equal, so several blocks of threads sum a row's gradient.
        Function{"embedding_of_frequent_rows",
                 {{40, 64}},
                 [](const auto& x) {
                   const at::Tensor ids = at::arange(700, at::kLong).square().remainder(40);
                   return nn::embedding(x[0], ids.to(x[0].device()));
                 }},
        Function{"grouped_linear",
                 {{37, 64}, {5, 48, 64}},
                 [](const auto& x) {
                   return tessera::detail::grouped_linear(x[0], x[1], {10, 0, 7, 20, 0});
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

/// Backward must add the fp32 product to an fp32 .grad without rounding the product to bf16 first.
TEST(LinearProduct, AccumulatesBf16ProductsInAnFp32Gradient) {
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

namespace tessera::kernels {
namespace {

at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed, double scale = 1) {
  at::manual_seed(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, at::kDouble).mul(scale);
}

double error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor wanted = expected.cpu().to(at::kDouble);
  return ((found.cpu().to(at::kDouble) - wanted).abs().max() / wanted.abs().max()).item<double>();
}

void expect_same_bits(const at::Tensor& on_gpu, const at::Tensor& on_cpu) {
  EXPECT_TRUE(at::equal(on_gpu.cpu(), on_cpu)) << on_cpu.scalar_type() << " " << on_cpu.sizes();
}

/// Returns the bytes of the fp8 values. Clears the signs of NaNs, because they are unspecified.
at::Tensor codes_of(const Fp8Rows& rows) {
  const at::Tensor codes = rows.values.cpu().view(at::kByte);
  const at::Tensor magnitudes = codes.remainder(128);
  return at::where(magnitudes.eq(127), magnitudes, codes);
}

TEST(QuantizeFp8OnGpu, EqualsTheCpuBitForBit) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    for (const auto& sizes : {std::vector<std::int64_t>{1, 1}, {5, 37}, {130, 72}, {512, 4096}}) {
      for (const double scale : {1.0, 1e-3, 1e-38, 1e30}) {
        const at::Tensor x = numbers(sizes, 1, scale).to(type);
        x[0][0].fill_(scale == 1.0 ? std::nan("") : 0.0);
        for (const at::Tensor& matrix : {x, x.t(), x.narrow(0, 0, 1)}) {
          const Fp8Rows expected = quantize_fp8(matrix), found = quantize_fp8(matrix.cuda());
          expect_same_bits(found.scales, expected.scales);
          EXPECT_TRUE(codes_of(found).equal(codes_of(expected))) << matrix.sizes() << " " << scale;
        }
      }
    }
  }
}

TEST(Fp8ProductsOnGpu, EqualTheCpuUpToRounding) {
  if (observe::compute_capability() < 89) {
    GTEST_SKIP() << "products in 8 bits need compute capability 8.9";
  }
  const at::Tensor x = numbers({3, 37, 128}, 2).to(at::kBFloat16);
  const at::Tensor weight = numbers({64, 128}, 3).to(at::kBFloat16);
  const at::Tensor grad = numbers({3, 37, 64}, 4).to(at::kBFloat16);
  EXPECT_LE(error(fp8_linear(x.cuda(), weight.cuda()), fp8_linear(x, weight)), 1e-2);
  EXPECT_LE(
      error(fp8_linear_input_grad(grad.cuda(), weight.cuda()), fp8_linear_input_grad(grad, weight)),
      1e-2);
  EXPECT_LE(error(fp8_linear_weight_grad(grad.cuda(), x.cuda()), fp8_linear_weight_grad(grad, x)),
            1e-2);
}

/// The tensors begin at element 0 or 1 of larger tensors: both alignments must work.
AdamWTensors update_of(std::int64_t size, c10::ScalarType moments, c10::Device device) {
  const auto part = [&](std::int64_t seed, double scale) {
    return numbers({size + 1}, seed, scale);
  };
  const auto at_odd = [&](const at::Tensor& x, c10::ScalarType type) {
    return x.to(device, type).narrow(0, size % 2, size);
  };
  return {.parameter = at_odd(part(size, 1), at::kFloat),
          .gradient = at_odd(part(size + 1, 1), at::kFloat),
          .exp_avg = at_odd(part(size + 2, 0.1), moments),
          .exp_avg_sq = at_odd(part(size + 3, 0.1).abs(), moments),
          .step = at::full({}, 7, at::dtype(at::kFloat).device(device)),
          .place = GlobalPlace::whole({size}),
          .local_sizes = {size},
          .stream = 11};
}

TEST(AdamWOnGpu, EqualsTheCpuBitForBit) {
  for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
    std::vector<std::vector<AdamWTensors>> updates;
    for (const c10::Device device : {c10::Device(c10::kCPU), c10::Device(c10::kCUDA, 0)}) {
      std::vector<AdamWTensors>& all = updates.emplace_back();
      for (const std::int64_t size : {1, 171, 4096, 50000}) {
        all.push_back(update_of(size, moments, device));
      }
      const auto number = [&](double x) {
        return at::full({}, x, at::dtype(at::kDouble).device(device));
      };
      adamw(all, {.beta1 = 0.9,
                  .beta2 = 0.95,
                  .eps = 1e-8,
                  .weight_decay = 0.1,
                  .seed = 5,
                  .lr = number(1e-2),
                  .gradient_factor = number(0.25)});
    }
    for (std::size_t i = 0; i < updates[0].size(); ++i) {
      expect_same_bits(updates[1][i].parameter, updates[0][i].parameter);
      expect_same_bits(updates[1][i].exp_avg, updates[0][i].exp_avg);
      expect_same_bits(updates[1][i].exp_avg_sq, updates[0][i].exp_avg_sq);
    }
  }
}

/// Runs optimizer steps with AdamW; in step i, one gradient element is increased by added[i].
/// Returns the parameter and its optimizer state.
std::vector<at::Tensor> after_steps(const std::vector<double>& added, c10::ScalarType type,
                                    c10::ScalarType moments) {
  const at::Tensor value = numbers({777}, 6).to(at::kCUDA, type).requires_grad_();
  const auto slot = std::make_shared<nn::ParameterSlot>(value, true);
  optim::AdamW optimizer({slot}, {.moment_dtype = moments});
  for (const double each : added) {
    slot->get().mutable_grad() = numbers({777}, 7).to(at::kCUDA, type);
    slot->get().grad()[5].add_(each);
    optimizer.step(optim::clip_factor({slot}, 0.5).factor);
  }
  std::vector<at::Tensor> end{slot->get().detach()};
  for (const optim::StateTensor& each : optimizer.state()) {
    end.push_back(each.tensor);
  }
  return end;
}

TEST(AdamWOnGpu, SkipsStepsWithNonFiniteGradients) {
  for (const c10::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
      const std::vector<at::Tensor> expected = after_steps({0, 0}, type, moments);
      for (const double bad : {std::nan(""), HUGE_VAL}) {
        const std::vector<at::Tensor> found = after_steps({bad, 0, bad, 0}, type, moments);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(found[i].equal(expected[i])) << type << " " << moments << " " << i;
        }
      }
    }
  }
}

TEST(RmsNormOnGpu, EqualsTheCpuForHugeAndTinyRows) {
  const at::Tensor scales = at::tensor({1e20, 1.0, 1e-25, 1e30, 3e37}, at::kDouble).unsqueeze(1);
  const at::Tensor weight = numbers({16384}, 8).to(at::kFloat);
  const at::Tensor x = (numbers({5, 16384}, 9) * scales).to(at::kFloat);
  const at::Tensor grad = numbers({5, 16384}, 10).to(at::kFloat);
  const RmsNormResult expected = rms_norm(x, weight, 1e-5);
  const RmsNormResult found = rms_norm(x.cuda(), weight.cuda(), 1e-5);
  const at::Tensor of_x = rms_norm_backward(grad, x, weight, expected.rstd).first;
  const at::Tensor of_x_found =
      rms_norm_backward(grad.cuda(), x.cuda(), weight.cuda(), found.rstd).first;
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    EXPECT_LE(error(found.out[row], expected.out[row]), 1e-5) << row;
    EXPECT_LE(error(of_x_found[row], of_x[row]), 1e-5) << row;
  }
}

/// One GPU computes three vocabulary shards. The test combines them itself, without all-reduces.
TEST(SplitCrossEntropyOnGpu, EqualsTheLossOfTheWholeVocabulary) {
  constexpr std::int64_t kRows = 33, kVocabulary = 5003;
  const RowLossOptions options{.label_smoothing = 0.1, .z_loss = 0.01};
  const at::Tensor targets = at::arange(kRows, at::kLong).mul(151);
  targets[3] = -100;
  const at::Tensor logits = numbers({kRows, kVocabulary}, 11, 4).to(at::kBFloat16);
  const LossRows whole{logits.to(at::kDouble), targets, kVocabulary, 0, options};
  const RowLosses expected = empty_losses(whole.logits);
  row_losses(whole, expected);
  const at::Tensor gradient = at::empty_like(whole.logits);
  logits_gradient(whole, expected.log_sum_exp, {}, gradient);

  std::vector<LossRows> parts;
  std::vector<RowTerms> terms;
  for (std::int64_t first = 0; first < kVocabulary; first += 2001) {
    const std::int64_t columns = std::min<std::int64_t>(2001, kVocabulary - first);
    parts.push_back({logits.narrow(1, first, columns).contiguous().cuda(), targets.cuda(),
                     kVocabulary, first, options});
    terms.push_back(row_terms(parts.back()));
  }
  const at::Tensor maximum =
      at::maximum(at::maximum(terms[0].maximum, terms[1].maximum), terms[2].maximum);
  at::Tensor sums;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    terms[i].all_maximum.copy_(maximum);
    make_relative(parts[i], terms[i]);
    sums = i == 0 ? terms[i].terms.clone() : sums + terms[i].terms;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    terms[i].terms.copy_(sums);
    const RowLosses found = empty_losses(parts[i].logits);
    losses_of_terms(parts[i], terms[i], found);
    EXPECT_LE(error(found.losses, expected.losses), 1e-5) << i;
    EXPECT_LE(error(found.log_sum_exp, expected.log_sum_exp), 1e-6) << i;
    const at::Tensor of_part = at::empty_like(parts[i].logits);
    logits_gradient(parts[i], found.log_sum_exp, {}, of_part);
    const at::Tensor wanted = gradient.narrow(1, parts[i].first_column, of_part.size(1));
    EXPECT_LE(error(of_part, wanted), 1e-2) << i;
  }
}

/// The weight's gradient is a sum over chunks of tokens, in fp32, and is rounded to bf16 once.
TEST(LinearCrossEntropyOnGpu, RoundsTheBf16GradientOnce) {
  constexpr std::int64_t kTokens = 640, kVocabulary = 256, kFeatures = 64;
  const at::Tensor hidden = numbers({kTokens, kFeatures}, 12).to(at::kBFloat16);
  const at::Tensor targets = at::arange(kTokens, at::kLong).mul(91).remainder(kVocabulary);
  // With a weight of zeros, all probabilities are 1/256: the gradients of logits are exact in bf16.
  const at::Tensor of_logits = at::full({kTokens, kVocabulary}, 1.0 / kVocabulary, at::kDouble);
  of_logits.scatter_add_(1, targets.unsqueeze(1), at::full({kTokens, 1}, -1.0, at::kDouble));
  const at::Tensor expected = of_logits.t().mm(hidden.to(at::kDouble));
  const at::Tensor rounding = (expected.to(at::kBFloat16).to(at::kDouble) - expected).abs();
  for (const std::int64_t chunks : {1, 3, 16, 17, 40}) {
    const at::Tensor weight =
        at::zeros({kVocabulary, kFeatures}, at::dtype(at::kBFloat16).device(at::kCUDA))
            .requires_grad_();
    tensor_parallel::linear_cross_entropy(
        hidden.cuda(), weight, targets.cuda(),
        {.loss = {.reduction = at::Reduction::Sum}, .chunks = chunks})
        .backward();
    const at::Tensor difference = (weight.grad().cpu().to(at::kDouble) - expected).abs();
    EXPECT_LE((difference - rounding).max().item<double>(), 1e-5) << chunks;
  }
}

TEST(CopyAllOnGpu, EqualsTheCpuBitForBit) {
  const std::vector<at::ScalarType> types{at::kFloat, at::kBFloat16, at::kHalf};
  const at::Tensor x = numbers({64, 48, 5}, 13);
  for (const at::ScalarType from_type : types) {
    for (const at::ScalarType to_type : types) {
      std::vector<std::vector<at::Tensor>> copies;
      for (const c10::Device device : {c10::Device(c10::kCPU), c10::Device(c10::kCUDA, 0)}) {
        const at::Tensor source = x.to(device, from_type);
        std::vector<at::Tensor>& to = copies.emplace_back();
        std::vector<at::Tensor> from;
        for (const at::Tensor& each :
             {source, source.narrow(1, 2, 40), source.select(2, 1),
              source.flatten().narrow(0, 1, 999), source.narrow(0, 0, 0)}) {
          from.push_back(each);
          const at::Tensor room = at::zeros({each.numel() + 1}, source.options().dtype(to_type));
          to.push_back(room.narrow(0, 1, each.numel()).view(each.sizes()));
        }
        copy_all(to, from);
      }
      for (std::size_t i = 0; i < copies[0].size(); ++i) {
        expect_same_bits(copies[1][i], copies[0][i]);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels

// Tests products whose input, the result of an RMS norm or silu_mul, is recomputed.
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "nn/graphs.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/functional.h"
#include "testing/memory.h"

namespace tessera::nn {
namespace {

using detail::linear_product;
using testing::expect_equal_bits;
using testing::leaves_of;
using testing::libtorchs;
using testing::results_of;

using Tensors = std::vector<at::Tensor>;
using Function = testing::GraphFunction;

constexpr double kEps = 1e-5;

at::Tensor with_norm(const Tensors& v) {
  const at::Tensor y = rms_norm(v[0], v[1], kEps);
  return linear_product(y, v[2], {}).mul(linear_product(y, v[3], {}));
}

/// The reference for with_norm(): libtorch's linear layers, which save their inputs.
at::Tensor with_kept_norm(const Tensors& v) {
  const at::Tensor y = rms_norm(v[0], v[1], kEps);
  return libtorchs(y, v[2]).mul(libtorchs(y, v[3]));
}

Tensors values_for_norm(at::ScalarType type = at::kFloat) {
  return {normal_values({11, 6}, 1).to(type), normal_values({6}, 2).to(type),
          normal_values({4, 6}, 3).to(type), normal_values({4, 6}, 4).to(type)};
}

at::Tensor with_norm_of_sum(const Tensors& v) {
  const auto [y, sum] = add_rms_norm(v[0], v[4], v[1], kEps);
  return linear_product(y, v[2], {}).mul(linear_product(sum, v[3], {}));
}

at::Tensor with_kept_norm_of_sum(const Tensors& v) {
  const at::Tensor sum = v[0] + v[4];
  return libtorchs(rms_norm(sum, v[1], kEps), v[2]).mul(libtorchs(sum, v[3]));
}

Tensors values_for_norm_of_sum(at::ScalarType type = at::kFloat) {
  Tensors values = values_for_norm(type);
  values.push_back(normal_values({11, 6}, 5).to(type));
  return values;
}

at::Tensor with_silu(const Tensors& v) {
  return linear_product(silu_mul(v[0], v[1]), v[2], {});
}

Tensors values_for_silu() {
  return {normal_values({11, 6}, 1), normal_values({11, 6}, 2), normal_values({4, 6}, 3)};
}

TEST(RecomputedInput, EqualsASavedInput) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    expect_equal_bits(with_norm, with_kept_norm, values_for_norm(type));
    expect_equal_bits(with_norm_of_sum, with_kept_norm_of_sum, values_for_norm_of_sum(type));
    expect_equal_bits(with_silu,
                      [](const Tensors& v) { return libtorchs(silu_mul(v[0], v[1]), v[2]); },
                      {normal_values({11, 6}, 1).to(type), normal_values({11, 6}, 2).to(type),
                       normal_values({4, 6}, 3).to(type)});
  }
}

/// Returns the bytes of the tensors that autograd saves, except the function's inputs and result.
std::int64_t kept_bytes(const Function& function, const Tensors& values) {
  const Tensors inputs = leaves_of(values);
  function(inputs);  // warm-up: the first call allocates more.
  const testing::AllocatedBytes memory;
  const at::Tensor y = function(inputs);
  return memory.now() - static_cast<std::int64_t>(y.nbytes());
}

TEST(RecomputedInput, IsNotSaved) {
  constexpr std::int64_t kRows = 64, kSize = 32;
  const Tensors norm{normal_values({kRows, kSize}, 1), normal_values({kSize}, 2),
                     normal_values({2, kSize}, 3), normal_values({2, kSize}, 4)};
  // The recomputation needs a copy of the norm's weight, but not the norm's result.
  EXPECT_EQ(kept_bytes(with_kept_norm, norm) - kept_bytes(with_norm, norm),
            4 * (kRows * kSize - kSize));
  Tensors sum = norm;
  sum.push_back(normal_values({kRows, kSize}, 5));
  EXPECT_EQ(kept_bytes(with_kept_norm_of_sum, sum) - kept_bytes(with_norm_of_sum, sum),
            4 * (kRows * kSize - kSize));
  const Tensors silu{normal_values({kRows, kSize}, 1), normal_values({kRows, kSize}, 2),
                     normal_values({2, kSize}, 3)};
  EXPECT_EQ(kept_bytes(with_silu, silu), 0);
}

TEST(RecomputedInput, IsFreedAfterTheBackward) {
  const Tensors v = leaves_of(values_for_norm());
  const at::Tensor y = with_norm(v);
  y.sum().backward({}, /*retain_graph=*/true);
  const testing::AllocatedBytes memory;
  // For v[2].grad, backward recomputes the norm's result, and must then free this result.
  torch::autograd::grad({y.sum()}, {v[2]}, {}, /*retain_graph=*/true);
  EXPECT_EQ(memory.now(), 0);
}

/// The norm's autograd node saves the sum, and the sum's grad_fn is this node. The cycle must not
/// leak.
TEST(RecomputedInput, OfASumIsFreedWithItsGraph) {
  const Tensors v = leaves_of(values_for_norm_of_sum());
  with_norm_of_sum(v);
  const testing::AllocatedBytes memory;
  with_norm_of_sum(v);
  EXPECT_EQ(memory.now(), 0);
}

TEST(RecomputedInput, SupportsTwoBackwards) {
  for (const auto& [function, values] :
       {std::pair<Function, Tensors>(with_norm, values_for_norm()),
        std::pair<Function, Tensors>(with_silu, values_for_silu())}) {
    const Tensors v = leaves_of(values);
    const at::Tensor loss = function(v).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor of_input = v[0].grad().clone(), of_weight = v[2].grad().clone();
    v[0].mutable_grad().zero_();
    loss.backward();
    EXPECT_EQUAL(v[0].grad(), of_input);
    // The second backward adds a product to the gradient in place, so rounding can differ.
    EXPECT_CLOSE(v[2].grad(), of_weight.mul(2), 1e-4, 1e-4);
    EXPECT_THROWN(std::exception, loss.backward(), "backward through the graph a second time");
  }
}

// If a program has changed the norm's result in place, later products must save this result.
TEST(RecomputedInput, IsSavedAfterAnInPlaceWrite) {
  const auto written = [](auto product) {
    return [product](const Tensors& v) {
      const at::Tensor y = rms_norm(v[0], v[1], kEps);
      {
        const c10::NoGradGuard no_grad;
        y.mul_(3);
      }
      return product(y, v[2], at::Tensor());
    };
  };
  expect_equal_bits(written(linear_product), written(libtorchs),
                    {normal_values({11, 6}, 1), normal_values({6}, 2), normal_values({4, 6}, 3)});
}

TEST(RecomputedInput, MayBeWrittenAfterTheProduct) {
  const Tensors values{normal_values({11, 6}, 1), normal_values({6}, 2), normal_values({4, 6}, 3)};
  expect_equal_bits(
      [](const Tensors& v) {
        const at::Tensor y = rms_norm(v[0], v[1], kEps);
        const at::Tensor z = linear_product(y, v[2], {});
        const c10::NoGradGuard no_grad;
        y.zero_();
        return z;
      },
      [](const Tensors& v) { return libtorchs(rms_norm(v[0], v[1], kEps), v[2]); }, values);
}

TEST(RecomputedInput, IsRefusedIfItsSourceWasWritten) {
  const at::Tensor gate = normal_values({5, 6}, 1).requires_grad_().mul(1);
  const at::Tensor up = normal_values({5, 6}, 2);
  const at::Tensor weight = normal_values({4, 6}, 3).requires_grad_();
  const at::Tensor loss = linear_product(silu_mul(gate, up), weight, {}).sum();
  gate.detach().zero_();
  EXPECT_THROWN(std::exception, torch::autograd::grad({loss}, {weight}),
                "modified by an inplace operation");
}

/// Backward of the product must not read the norm's weight, which FSDP can have freed.
TEST(RecomputedInput, NeedsNoWeightOfTheNormInBackward) {
  const Tensors values = values_for_norm();
  const Tensors expected = results_of(with_kept_norm, values);
  const Tensors v = leaves_of(values);
  const at::Tensor y = with_norm(v);
  {
    const c10::NoGradGuard no_grad;
    v[1].detach().fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const Tensors found = torch::autograd::grad({y}, {v[2], v[3]}, {normal_values(y.sizes(), 99)});
  EXPECT_EQUAL(found[0], expected[3]);
  EXPECT_EQUAL(found[1], expected[4]);
}

TEST(RecomputedInput, SupportsSecondDerivatives) {
  const auto second = [](const Function& function) {
    return [function](const Tensors& v) {
      return torch::autograd::grad({function(v).square().sum()}, {v[2]}, {}, /*retain_graph=*/true,
                                   /*create_graph=*/true)[0]
          .square();
    };
  };
  const auto with_kept_silu = [](const Tensors& v) {
    return libtorchs(silu_mul(v[0], v[1]), v[2]);
  };
  const Tensors silu{normal_values({5, 6}, 1), normal_values({5, 6}, 2), normal_values({4, 6}, 3)};
  EXPECT_EACH(results_of(second(with_silu), silu), results_of(second(with_kept_silu), silu), 1e-5,
              1e-5);
  const Tensors sum = values_for_norm_of_sum(at::kDouble);
  EXPECT_EACH(results_of(second(with_norm_of_sum), sum),
              results_of(second(with_kept_norm_of_sum), sum), 1e-5, 1e-5);
}

class NamedCalls final : public OperatorMode {
 public:
  Results call(const Operator& op, const std::function<Results()>& run) override {
    if (op.name.starts_with("tessera::")) {
      names.push_back(op.name);
    }
    return run();
  }
  std::vector<std::string> names;
};

std::vector<std::string> operators_of_backward(const at::Tensor& y) {
  NamedCalls calls;
  const OperatorModeScope scope(calls);
  y.sum().backward();
  return calls.names;
}

TEST(RecomputedInput, OfSiluMulSharesAKernelWithBackward) {
  Tensors v = leaves_of(values_for_silu());
  EXPECT_EQ(operators_of_backward(with_silu(v)),
            std::vector<std::string>{"tessera::silu_mul_with_gradients"});
  v[2].requires_grad_(false);
  EXPECT_EQ(operators_of_backward(with_silu(v)),
            std::vector<std::string>{"tessera::silu_mul_backward"});
}

/// A hook on silu_mul's result, or a second use of it, changes the gradient of the product.
TEST(RecomputedInput, OfSiluMulRespectsHooksAndOtherUses) {
  const auto hooked = [](auto product, const std::function<at::Tensor(at::Tensor)>& hook) {
    return [=](const Tensors& v) {
      const at::Tensor inner = silu_mul(v[0], v[1]);
      inner.register_hook(hook);
      return product(inner, v[2], at::Tensor());
    };
  };
  for (const auto& hook : std::vector<std::function<at::Tensor(at::Tensor)>>{
           [](const at::Tensor& gradient) { return gradient * 2; },
           [](const at::Tensor& gradient) { return gradient.mul_(2); },
           [](const at::Tensor& gradient) { return gradient.clone(); }}) {
    expect_equal_bits(hooked(linear_product, hook), hooked(libtorchs, hook), values_for_silu());
  }
  const auto used_twice = [](auto product) {
    return [product](const Tensors& v) {
      const at::Tensor inner = silu_mul(v[0], v[1]);
      return product(inner, v[2], at::Tensor()).sum(1) + inner.square().sum(1);
    };
  };
  EXPECT_EACH(results_of(used_twice(linear_product), values_for_silu()),
              results_of(used_twice(libtorchs), values_for_silu()), 1e-5, 1e-5);
}

TEST(RecomputedInput, IsNotRecomputedTwiceInACheckpoint) {
  const auto expect_left = [](const Function& function, const Function& kept, const Tensors& v) {
    const testing::Counted counted;
    expect_equal_bits(
        [&](const Tensors& inputs) { return checkpoint(counted.options, function, inputs); }, kept,
        v);
    // Saved tensors: 3 for the norm, 2 for each of the two products, 2 for mul().
    EXPECT_EQ(counted->packed, 9);
  };
  expect_left(with_norm, with_kept_norm, values_for_norm());
  expect_left(with_norm_of_sum, with_kept_norm_of_sum, values_for_norm_of_sum());
}

/// The same placements as in tensor parallelism without sequence parallelism.
TEST_ON_MESH(RecomputedInput, MayBeDistributed, {3}, {"tp"}) {
  const Tensors values{normal_values({5, 8}, 1), normal_values({8}, 2), normal_values({7, 8}, 3),
                       normal_values({7, 8}, 4), normal_values({8, 7}, 5)};
  const std::vector<Placement> placements{Replicate{}, Replicate{}, Shard{0}, Shard{0}, Shard{1}};
  const auto mlp = [](const Tensors& v) {
    const at::Tensor y = rms_norm(v[0], v[1], kEps);
    const at::Tensor inner = silu_mul(linear_product(y, v[2], {}), linear_product(y, v[3], {}));
    return linear_product(inner, v[4], {});
  };
  const Tensors alone = leaves_of(values);
  mlp(alone).square().sum().backward();
  Tensors spread;
  for (std::size_t i = 0; i < values.size(); ++i) {
    spread.push_back(testing::leaf_on(mesh, values[i], {placements[i]}));
  }
  const Sent sent(rank);
  DistributedTensor(mlp(spread)).redistribute({Replicate{}}).tensor().square().sum().backward();
  // One all-reduce for the MLP's result, and one for the gradient of the norm's result.
  EXPECT_EQ(sent.calls(), 2);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_CLOSE(spread[i].grad(), alone[i].grad(), 1e-4, 1e-4) << i;
  }
}

}  // namespace
}  // namespace tessera::nn

// The product of a Linear against libtorch's.
#include "tessera/nn/detail/linear_product.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "nn/graph_results.h"
#include "testing/distributed.h"
#include "testing/memory/allocated_bytes.h"

namespace tessera::nn {
namespace {

using detail::linear_product;
using testing::expect_close;
using testing::expect_equal_bits;
using testing::leaves_of;
using testing::libtorchs;
using testing::normal_values;
using testing::results_of;

using Tensors = std::vector<at::Tensor>;

TEST(LinearProduct, HasLibtorchsBits) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{7, 12}, {2, 5, 12}, {1, 12}, {0, 12}, {2, 3, 4, 12}}) {
      const Tensors values{normal_values(sizes, 1).to(type), normal_values({9, 12}, 2).to(type),
                           normal_values({9}, 3).to(type)};
      expect_equal_bits([](const Tensors& v) { return linear_product(v[0], v[1], v[2]); },
                        [](const Tensors& v) { return libtorchs(v[0], v[1], v[2]); }, values);
      expect_equal_bits([](const Tensors& v) { return linear_product(v[0], v[1], {}); },
                        [](const Tensors& v) { return libtorchs(v[0], v[1]); },
                        {values[0], values[1]});
    }
  }
}

TEST(LinearProduct, TakesVectors) {
  expect_equal_bits([](const Tensors& v) { return linear_product(v[0], v[1], v[2]); },
                    [](const Tensors& v) { return libtorchs(v[0], v[1], v[2]); },
                    {normal_values({12}, 1), normal_values({9, 12}, 2), normal_values({9}, 3)});
}

TEST(LinearProduct, IsCastByAutocast) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor weight = normal_values({4, 6}, 2).requires_grad_();
  const at::Tensor y = linear_product(normal_values({3, 6}, 1), weight, {});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(LinearProduct, MayBeWrittenTo) {
  const auto doubled = [](auto product) {
    return [product](const Tensors& v) { return product(v[0], v[1], v[2]).mul_(2); };
  };
  expect_equal_bits(doubled(linear_product), doubled(libtorchs),
                    {normal_values({2, 5, 6}, 1), normal_values({4, 6}, 2), normal_values({4}, 3)});
}

TEST(LinearProduct, IsDifferentiableTwice) {
  const auto second = [](auto product) {
    return [product](const Tensors& v) {
      const at::Tensor y = product(v[0], v[1], v[2]).square().sum();
      return torch::autograd::grad({y}, {v[0]}, {}, /*retain_graph=*/true,
                                   /*create_graph=*/true)[0]
          .square();
    };
  };
  const Tensors values{normal_values({5, 6}, 1), normal_values({4, 6}, 2), normal_values({4}, 3)};
  expect_close(results_of(second(linear_product), values), results_of(second(libtorchs), values));
}

TEST(LinearProduct, KeepsNoInputOfAFrozenWeight) {
  const at::Tensor weight = normal_values({6, 6}, 1);
  const at::Tensor x = normal_values({50, 6}, 2).requires_grad_();
  linear_product(x.mul(2), weight, {});
  const testing::AllocatedBytes memory;
  const at::Tensor y = linear_product(x.mul(2), weight, {});
  // A factor that mul() keeps is a number.
  EXPECT_LT(memory.now(), 2 * 4 * x.numel());
  y.sum().backward();
  EXPECT_TRUE(x.grad().allclose(weight.sum(0).mul(2).expand_as(x)));
}

// What is computed again.

}  // namespace
}  // namespace tessera::nn

// Canary: nodes of our own in autograd's graph.

#include "tessera/internals/detail/graph_node.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

namespace tessera::detail {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

struct Times final : Node {
  explicit Times(double f) : factor(f) {}
  variable_list apply(variable_list&& gradients) override { return {gradients[0] * factor}; }
  NodePtr<Node> self() { return pointer_to(*this); }
  double factor;
};

struct Other final : Node {
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};

at::Tensor times(const at::Tensor& x, double factor) {
  at::Tensor result = x.detach() * factor;
  const auto node = make_node<Times>(factor);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, node);
  return result;
}

TEST(GraphNodeCanary, RunsInABackward) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  times(times(x, 3), 2).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 6.0)));
}

TEST(GraphNodeCanary, IsFoundByItsClass) {
  const at::Tensor y = times(at::ones({2}).requires_grad_(), 3);
  const NodePtr<Times> found = node_cast<Times>(y.grad_fn());
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->factor, 3);
  EXPECT_EQ(found->self().get(), y.grad_fn().get());
  EXPECT_EQ(node_cast<Other>(y.grad_fn()), nullptr);
}

TEST(GraphNodeCanary, ALongChainIsFreedWithoutRecursion) {
  at::Tensor x = at::ones({1}).requires_grad_();
  for (int i = 0; i < 300'000; ++i) {
    x = times(x, 1);
  }
  x = at::Tensor();  // a recursion this deep would end the process
}

}  // namespace
}  // namespace tessera::detail

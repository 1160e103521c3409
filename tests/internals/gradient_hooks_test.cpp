// Canary: the hooks of a tensor and of its node are found, and told from the library's own.

#include "tessera/internals/detail/gradient_hooks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "tessera/internals/detail/graph_node.h"

namespace own_program {

using torch::autograd::variable_list;

/// A node of a class that is neither libtorch's nor the library's.
struct Noting : torch::autograd::Node {
  explicit Noting(std::vector<tessera::detail::BackwardCode>& found) : codes(found) {}
  variable_list apply(variable_list&& gradients) override {
    codes.push_back(tessera::detail::backward_code());
    return {gradients[0]};
  }
  std::vector<tessera::detail::BackwardCode>& codes;
};

}  // namespace own_program

namespace tessera::detail {
namespace {

/// Notes what runs where it is called.
auto noting(std::vector<BackwardCode>& codes) {
  return [&codes](const at::Tensor& gradient) {
    codes.push_back(backward_code());
    return gradient;
  };
}

TEST(GradientHooksCanary, FindsTheLibrarysHooksAndCountsThemAsFormulas) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 2;
  for (const at::Tensor& tensor : {x, y}) {
    EXPECT_FALSE(has_own_hook(tensor, OwnHook::kNotice));
    add_own_hook(tensor, OwnHook::kNotice, noting(codes));
    EXPECT_TRUE(has_own_hook(tensor, OwnHook::kNotice));
    EXPECT_FALSE(has_own_hook(tensor, OwnHook::kMakePlain));
  }
  y.sum().backward();
  EXPECT_EQ(codes, std::vector(2, BackwardCode::kFormula));
  EXPECT_EQ(backward_code(), BackwardCode::kNone);
}

TEST(GradientHooksCanary, SeesTheProgramsHooksOnLeavesAndOtherTensors) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 2;
  x.register_hook(noting(codes));
  y.register_hook(noting(codes));
  y.sum().backward();
  EXPECT_EQ(codes, std::vector(2, BackwardCode::kFormulaOrProgram));
}

TEST(GradientHooksCanary, CountsNoRemovedHooks) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const unsigned hook = x.register_hook([](const at::Tensor& gradient) { return gradient; });
  add_own_hook(x, OwnHook::kNotice, noting(codes));
  x.remove_hook(hook);
  x.sum().backward();
  EXPECT_EQ(codes, std::vector{BackwardCode::kFormula});
}

struct Noting : torch::autograd::Function<Noting> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    EXPECT_EQ(backward_code(), BackwardCode::kFormulaOrProgram);
    return gradients;
  }
};

TEST(BackwardCodeCanary, IsTheProgramsInAFunctionAndAutogradsInOtherNodes) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = Noting::apply(x) * 2;
  add_own_hook(y, OwnHook::kNotice, noting(codes));
  y.sum().backward();
  EXPECT_EQ(codes, std::vector{BackwardCode::kFormula});
}

struct OfTheLibrary : own_program::Noting {
  using Noting::Noting;
};

TEST(BackwardCodeCanary, IsTheProgramsInANodeOfAnUnknownClass) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const auto behind = [&x](const NodePtr<torch::autograd::Node>& node) {
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    at::Tensor y = x.detach().clone();
    torch::autograd::set_history(y, node);
    return y;
  };
  behind(make_node<own_program::Noting>(codes)).sum().backward();
  behind(make_node<OfTheLibrary>(codes)).sum().backward();
  EXPECT_EQ(codes, (std::vector{BackwardCode::kFormulaOrProgram, BackwardCode::kFormula}));
}

}  // namespace
}  // namespace tessera::detail

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// Canaries (tests that fail if libtorch changes): reads and writes of autograd's graph.

namespace {

at::Tensor leaf() {
  return at::ones({2}).requires_grad_();
}

struct Identity : Node {
  using Node::Node;
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};

struct Counting final : LeafNode {
  using LeafNode::LeafNode;
  variable_list apply(variable_list&& gradients) override {
    ++calls;
    return LeafNode::apply(std::move(gradients));
  }
  int calls = 0;
};

TEST(LeafNodeCanary, IsTheNodeAtTheEndOfTheGraph) {
  const at::Tensor x = leaf();
  const at::Tensor y = x * 2;
  const Edge& edge = y.grad_fn()->next_edge(0);
  EXPECT_EQ(leaf_node(x).get(), edge.function.get());
  ASSERT_NE(as_leaf(edge), nullptr);
  EXPECT_TRUE(as_leaf(edge)->variable.is_same(x));
  EXPECT_EQ(as_leaf(edge_to(y)), nullptr);
}

TEST(LeafNodeCanary, MayBeReplaced) {
  const at::Tensor x = leaf();
  const auto node = make_node<Counting>(x);
  set_leaf_node(x, node);
  (x * 2).sum().backward();
  EXPECT_EQ(node->calls, 1);
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0)));
}

TEST(LeafNodeCanary, AddsToAnExistingGradient) {
  const at::Tensor x = leaf();
  const at::Tensor sum = at::full({2}, 5.0);
  x.mutable_grad() = sum;
  (x * 2).sum().backward();
  EXPECT_TRUE(x.grad().is_same(sum));
  EXPECT_TRUE(at::equal(sum, at::full({2}, 7.0)));
  (*leaf_node(x))({at::Tensor()});
  EXPECT_TRUE(x.grad().is_same(sum));
  EXPECT_TRUE(at::equal(sum, at::full({2}, 7.0)));
  // With create_graph=true, backward assigns a new tensor to x.grad and keeps the old one.
  (x * 2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(at::equal(sum, at::full({2}, 7.0)));
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 9.0)));
  x.mutable_grad() = at::Tensor();
}

TEST(GuardedViewCanary, CannotBeWritten) {
  const at::Tensor x = leaf() * 1;
  const at::Tensor view = guarded_view(x);
  const auto node = make_node<Identity>();
  set_inputs(*node, x);
  set_node(view, node);
  EXPECT_TRUE(view.is_alias_of(x));
  EXPECT_EQ(view.grad_fn().get(), node.get());
  EXPECT_THROW(view.add_(1), c10::Error);
}

struct TimesKept final : Node {
  explicit TimesKept(const at::Tensor& tensor) : kept(tensor, /*is_output=*/false) {}
  variable_list apply(variable_list&& gradients) override { return {gradients[0] * kept.unpack()}; }
  void release_variables() override { kept.reset_data(); }
  SavedVariable kept;
};

at::Tensor times_kept(const at::Tensor& x, const at::Tensor& factor) {
  at::Tensor result = x.detach() * factor;
  const auto node = make_node<TimesKept>(factor);
  set_inputs(*node, x);
  set_node(result, node);
  return result;
}

TEST(SavedTensorCanary, IsReturnedOnceInBackward) {
  const at::Tensor x = leaf();
  const at::Tensor y = times_kept(x, at::full({2}, 3.0));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(SavedTensorCanary, CannotBeUsedAfterAWrite) {
  const at::Tensor factor = at::full({2}, 3.0);
  const at::Tensor y = times_kept(leaf(), factor);
  factor.add_(1);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

struct ExpNode final : Node {
  variable_list apply(variable_list&& gradients) override {
    const at::Tensor kept = result.unpack(pointer_to(*this));
    led_here = kept.grad_fn().get() == this;
    return {gradients[0] * kept};
  }
  SavedVariable result;
  bool led_here = false;
};

TEST(SavedTensorCanary, MayBeTheNodesOwnResult) {
  const at::Tensor x = leaf();
  const auto node = make_node<ExpNode>();
  set_inputs(*node, x);
  const at::Tensor y = x.detach().exp();
  set_node(y, node);
  node->result = SavedVariable(y, /*is_output=*/true);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y));
  EXPECT_TRUE(node->led_here);
}

TEST(SequenceNumberCanary, CountsTheNodesOfAThread) {
  const at::Tensor x = leaf();
  const std::uint64_t taken = take_sequence_number();
  EXPECT_EQ((x * 2).grad_fn()->sequence_nr(), taken + 1);
}

struct NamedNode final : Identity {
  NamedNode(std::uint64_t number, std::string* to, char what)
      : Identity(number), order(to), who(what) {}
  variable_list apply(variable_list&& gradients) override {
    *order += who;
    return std::move(gradients);
  }
  std::string* order;
  char who;
};

TEST(SequenceNumberCanary, DecidesWhichOfTheReadyNodesRuns) {
  std::string order;
  const at::Tensor x = leaf();
  const std::uint64_t late = take_sequence_number();
  const std::uint64_t early = take_sequence_number();
  at::Tensor sum;
  for (const auto& [number, name] : {std::pair(early, 'e'), std::pair(late, 'l')}) {
    const at::Tensor y = at::ones({2});
    const auto node = make_node<NamedNode>(number, &order, name);
    set_inputs(*node, x);
    set_node(y, node);
    sum = sum.defined() ? y + sum : y;
  }
  sum.sum().backward();
  EXPECT_EQ(order, "el");
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * x;
  }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list gradients) {
    names.push_back(running_node());
    return gradients;
  }
  static inline std::vector<std::string> names;
};

TEST(RunningBackwardCanary, HasAnIdAndANode) {
  EXPECT_EQ(backward_id(), -1);
  EXPECT_EQ(running_node(), "");
  EXPECT_EQ(origin_of_running_node(), std::nullopt);
  const at::Tensor x = leaf();
  const at::Tensor y = x * x;
  std::vector<int> ids;
  std::string name;
  std::optional<std::uint64_t> origin;
  y.register_hook([&](const at::Tensor& gradient) {
    ids.push_back(backward_id());
    name = running_node();
    origin = origin_of_running_node();
    return gradient;
  });
  const at::Tensor loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_GE(ids.front(), 0);
  EXPECT_NE(ids.front(), ids.back());
  EXPECT_EQ(name, "MulBackward0");
  EXPECT_EQ(origin, at::RecordFunction::currentThreadId());
  EXPECT_EQ(backward_id(), -1);
}

TEST(RunningBackwardCanary, NamesACustomFunction) {
  Square::apply(leaf()).sum().backward();
  EXPECT_EQ(Square::names,
            std::vector<std::string>{"tessera::detail::(anonymous namespace)::Square"});
}

TEST(RunningBackwardCanary, ReportsWhetherTheGraphIsRetained) {
  std::vector<bool> kept;
  const at::Tensor y = leaf() * 2;
  y.register_hook([&](const at::Tensor& gradient) {
    kept.push_back(keeps_graph());
    return gradient;
  });
  const at::Tensor loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_EQ(kept, std::vector({true, false}));
}

TEST(RunningBackwardCanary, RunsQueuedCallbacksAtTheEnd) {
  std::string order;
  const at::Tensor x = leaf();
  (x * 2).register_hook([&](const at::Tensor& gradient) { return gradient; });
  const at::Tensor y = x * 2;
  y.register_hook([&](const at::Tensor& gradient) {
    queue_end_of_backward([&] {
      order += x.grad().defined() ? "end " : "too soon ";
      queue_end_of_backward([&] { order += "last"; });
    });
    return gradient;
  });
  y.sum().backward();
  EXPECT_EQ(order, "end last");
  EXPECT_THROW(queue_end_of_backward([] {}), c10::Error);
}

TEST(AutogradRecordCanary, HasNamesLeavesAndViews) {
  const at::Tensor x = leaf();
  set_name(x, "x");
  EXPECT_EQ(x.name(), "x");
  const at::Tensor y = x * 2;
  EXPECT_TRUE(is_trainable_leaf(*x.unsafeGetTensorImpl()));
  EXPECT_FALSE(is_trainable_leaf(*y.unsafeGetTensorImpl()));
  EXPECT_TRUE(viewed_by(y.view({1, 2}).select(0, 0)).is_same(y));
  EXPECT_TRUE(viewed_by(y).is_same(y));
  const at::Tensor plain = at::ones({2});
  const c10::NoGradGuard no_grad;
  EXPECT_TRUE(viewed_by(plain.view({1, 2})).is_same(plain));
}

// Canary: node_cast() must find nodes of the library's own classes in libtorch's graph.

TEST(GraphNodeCanary, IsFoundByItsClass) {
  const at::Tensor y = times_kept(leaf(), at::full({2}, 3.0));
  const NodePtr<TimesKept> found = node_cast<TimesKept>(y.grad_fn());
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(pointer_to(*found).get(), y.grad_fn().get());
  EXPECT_EQ(node_cast<Identity>(y.grad_fn()), nullptr);
}

TEST(GraphNodeCanary, ALongChainIsFreedWithoutRecursion) {
  at::Tensor x = leaf();
  const at::Tensor one = at::ones({2});
  for (int i = 0; i < 300'000; ++i) {
    x = times_kept(x, one);
  }
  x = at::Tensor();  // The graph must be freed without recursion: the stack would overflow.
}

}  // namespace
}  // namespace tessera::detail

namespace own_program {

// Canary: the library must find hooks of tensors and nodes, and must recognize its own hooks.

using torch::autograd::variable_list;

/// A node whose class is defined outside the library, as in a user's program.
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

auto noting(std::vector<BackwardCode>& codes) {
  return [&codes](const at::Tensor& gradient) {
    codes.push_back(backward_code());
    return gradient;
  };
}

TEST(GradientHooksCanary, TreatsHooksOfTheLibraryLikeFormulas) {
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

TEST(GradientHooksCanary, FindsHooksOfTheProgram) {
  std::vector<BackwardCode> codes;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 2;
  x.register_hook(noting(codes));
  y.register_hook(noting(codes));
  y.sum().backward();
  EXPECT_EQ(codes, std::vector(2, BackwardCode::kFormulaOrProgram));
}

TEST(GradientHooksCanary, IgnoresRemovedHooks) {
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

TEST(GradientHooksCanary, DistinguishesCustomFunctionsFromFormulas) {
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

TEST(GradientHooksCanary, TreatsUnknownNodesLikeProgramCode) {
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

// Walks over modules and over tensors, and patterns of names.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/visit_modules.h"
#include "tessera/nn/visit_tensors.h"

namespace tessera::nn {
namespace {

using Names = std::vector<std::string>;

class StockModule : public torch::nn::Module {};

/// "again" is "block" once more; "stock" is a module of libtorch with one of ours in it.
class Tree : public Module<Tree> {
 public:
  Tree() {
    block = register_module("block", std::make_shared<ModuleList>());
    block->push_back(std::make_shared<Linear>(1, 1));
    register_module("again", block);
    const auto stock = register_module("stock", std::make_shared<StockModule>());
    stock->register_module("inner", std::make_shared<Linear>(1, 1));
  }
  void forward() {}

  std::shared_ptr<ModuleList> block;
};

Names visited(Tree& tree, const ModuleWalk& walk = {}) {
  Names names;
  visit_modules(
      tree, [&](const std::string& fqn, torch::nn::Module&) { names.push_back(fqn); }, walk);
  return names;
}

TEST(VisitModules, GoesInTheOrderAskedFor) {
  Tree tree;
  const auto is_block = [&](const torch::nn::Module& module) {
    return &module == tree.block.get();
  };
  EXPECT_EQ(visited(tree), (Names{"", "block", "block.0", "stock", "stock.inner"}));
  EXPECT_EQ(visited(tree, {.children_first = true}),
            (Names{"block.0", "block", "stock.inner", "stock", ""}));
  EXPECT_EQ(visited(tree, {.every_place = true}),
            (Names{"", "block", "block.0", "again", "again.0", "stock", "stock.inner"}));
  for (const bool every_place : {false, true}) {
    EXPECT_EQ(visited(tree, {.every_place = every_place, .skip = is_block}),
              (Names{"", "stock", "stock.inner"}));
  }
  Names of_bases;
  visit_modules(tree, [&](const std::string& fqn, ModuleBase&) { of_bases.push_back(fqn); });
  EXPECT_EQ(of_bases, (Names{"", "block", "block.0", "stock.inner"}));
}

TEST(VisitModules, ReadsAConstTree) {
  const Tree tree;
  std::size_t slots = 0;
  visit_modules(
      tree, [&](const std::string&, const ModuleBase& module) { slots += module.slots().size(); });
  EXPECT_EQ(slots, 4);
  std::size_t modules = 0;
  visit_modules(tree, [&](const std::string&, const torch::nn::Module&) { ++modules; });
  EXPECT_EQ(modules, 5);
}

TEST(JoinFqn, LeavesTheRootOut) {
  EXPECT_EQ(join_fqn("", "head"), "head");
  EXPECT_EQ(join_fqn("layers.0", "mlp"), "layers.0.mlp");
}

}  // namespace
}  // namespace tessera::nn

namespace user {

struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  int count = 0;
};

template <class Visit>
void visit_tensors(Batch& batch, Visit&& visit) {
  visit(batch.tokens);
  tessera::nn::visit_tensors(batch.mask, visit);
}

}  // namespace user

namespace tessera::nn {
namespace {

at::Tensor number(int i) {
  return at::scalar_tensor(i);
}

template <class T>
std::vector<int> numbers(T value) {
  std::vector<int> found;
  for (const at::Tensor* tensor : collect_tensors(value)) {
    found.push_back(tensor->item<int>());
  }
  return found;
}

using Ints = std::vector<int>;

TEST(VisitTensors, FindsThoseInContainersAndNoneInOtherTypes) {
  EXPECT_EQ(numbers(number(1)), Ints{1});
  EXPECT_EQ(numbers(std::tuple(number(1), 7, std::pair(number(2), number(3)))), (Ints{1, 2, 3}));
  EXPECT_EQ(numbers(std::vector{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::array{number(3), number(4)}), (Ints{3, 4}));
  EXPECT_EQ(numbers(std::optional(number(1))), Ints{1});
  EXPECT_EQ(numbers(std::optional<at::Tensor>()), Ints{});
  EXPECT_EQ(numbers(std::map<std::string, at::Tensor>{{"b", number(2)}, {"a", number(1)}}),
            (Ints{1, 2}));
  EXPECT_EQ(numbers(3), Ints{});
  EXPECT_EQ(numbers(std::string("x")), Ints{});
  EXPECT_EQ(numbers(std::vector<bool>{true}), Ints{});
}

TEST(VisitTensors, CallsAUsersOverload) {
  EXPECT_EQ(numbers(user::Batch{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::vector{user::Batch{number(1), {}}, user::Batch{number(2), number(3)}}),
            (Ints{1, 2, 3}));
}

TEST(VisitTensors, ReplacesInPlaceAndVisitsUndefinedTensors) {
  auto value = std::tuple(number(1), std::vector{number(2)});
  for (at::Tensor* tensor : collect_tensors(value)) {
    *tensor = *tensor * 10;
  }
  EXPECT_EQ(numbers(value), (Ints{10, 20}));
  std::tuple<at::Tensor, at::Tensor> undefined{at::Tensor(), number(1)};
  EXPECT_EQ(collect_tensors(undefined).size(), 2U);
}

}  // namespace
}  // namespace tessera::nn

#include "tessera/nn/visit_modules.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"

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

TEST(VisitModules, GoesParentsFirstInOrderOfRegistration) {
  Tree tree;
  EXPECT_EQ(visited(tree), (Names{"", "block", "block.0", "stock", "stock.inner"}));
}

TEST(VisitModules, GoesChildrenFirstIfAskedTo) {
  Tree tree;
  EXPECT_EQ(visited(tree, {.children_first = true}),
            (Names{"block.0", "block", "stock.inner", "stock", ""}));
}

TEST(VisitModules, MeetsASharedModuleAtEachPlaceIfAskedTo) {
  Tree tree;
  EXPECT_EQ(visited(tree, {.every_place = true}),
            (Names{"", "block", "block.0", "again", "again.0", "stock", "stock.inner"}));
}

TEST(VisitModules, SkipsAModuleWithAllBelowIt) {
  Tree tree;
  const auto is_block = [&](const torch::nn::Module& module) {
    return &module == tree.block.get();
  };
  const Names left{"", "stock", "stock.inner"};
  EXPECT_EQ(visited(tree, {.skip = is_block}), left);
  EXPECT_EQ(visited(tree, {.every_place = true, .skip = is_block}), left);
}

TEST(VisitModules, ShowsAVisitorOfModuleBasesNoStockModules) {
  Tree tree;
  Names names;
  visit_modules(tree, [&](const std::string& fqn, ModuleBase&) { names.push_back(fqn); });
  EXPECT_EQ(names, (Names{"", "block", "block.0", "stock.inner"}));
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

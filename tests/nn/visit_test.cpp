// Walks over modules and over tensors, and patterns of names.

#include <ATen/ATen.h>

#include <chrono>

#include "tessera/nn/containers.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/nn/visit_tensors.h"
#include "testing/errors.h"

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
  EXPECT_EQ(detail::join_fqn("", "head"), "head");
  EXPECT_EQ(detail::join_fqn("layers.0", "mlp"), "layers.0.mlp");
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
  for (const at::Tensor* tensor : detail::collect_tensors(value)) {
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
  for (at::Tensor* tensor : detail::collect_tensors(value)) {
    *tensor = *tensor * 10;
  }
  EXPECT_EQ(numbers(value), (Ints{10, 20}));
  std::tuple<at::Tensor, at::Tensor> undefined{at::Tensor(), number(1)};
  EXPECT_EQ(detail::collect_tensors(undefined).size(), 2U);
}

/// Names that a pattern matches, and names that it does not.
struct Row {
  const char* pattern;
  std::vector<const char*> matched, others;
};

TEST(FqnPattern, MatchesNames) {
  const std::vector<Row> rows{
      {"a.b.weight", {"a.b.weight"}, {"a.b"}},
      {"a.b", {}, {"a.b.weight"}},
      {"", {""}, {"a"}},
      // A star stays inside a component, and may be anywhere in it or stand for nothing.
      {"*", {"a"}, {"", "a.b"}},
      {"layers.*.w", {"layers.10.w"}, {"layers.0.1.w"}},
      {"layers.*", {}, {"layers.0.w"}},
      {"l.*_proj.w", {"l.q_proj.w"}, {"l.q_norm.w"}},
      {"l.*_*.w", {"l.up_proj_x.w"}, {}},
      {"a*a.b", {"aaa.b"}, {}},
      {"a*.c", {}, {"ab.d"}},
      {"a*.b*", {"a.b"}, {}},
      // A question mark is one character.
      {"layers.?.w", {"layers.3.w"}, {"layers.10.w"}},
      {"a?b", {}, {"a.b"}},
      // Brackets are one of their characters, or of the others.
      {"block*.mixer.[qkv]", {"block0.mixer.k"}, {"block0.mixer.o"}},
      {"layers.[0-3].w", {"layers.2.w"}, {"layers.4.w", "layers.22.w"}},
      {"[a-cx-z]", {"y"}, {}},
      {"[a-]", {"-"}, {}},
      {"layers.[!0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"layers.[^0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"a[!x]b", {}, {"a.b"}},
      {"a[b", {"a[b"}, {"ab"}},  // not closed
      {"[]]", {"]"}, {}},
      {"[!]]", {"x"}, {}},
      // Two stars are any number of components; within a component they are one star.
      {"layers.**.w", {"layers.0.mlp.up.w", "layers.w"}, {"layers.0.mlp.b"}},
      {"**.w", {"w"}, {}},
      {"**.mlp.**", {"layers.0.mlp"}, {}},
      {"a.**.b.**.c", {"a.b.b.x.c"}, {"a.x.c"}},
      {"**", {"", "a.b"}, {}},
      {"a**c", {"abc"}, {"a.c"}},
      // An empty component matches no module.
      {"layers.", {}, {"layers"}},
      {".layers", {}, {"layers"}}};
  for (const Row& row : rows) {
    for (const char* name : row.matched) {
      EXPECT_TRUE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
    for (const char* name : row.others) {
      EXPECT_FALSE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
  }
}

// Backtracking over every star would take longer than the age of the universe.
TEST(FqnPattern, ManyStarsTakeNoTime) {
  std::string stars, name, levels, path;
  for (int i = 0; i < 40; ++i) {
    stars += "*a";
    name += "aaa";
    levels += "**.a.";
    path += "a.a.a.";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(matches_fqn(stars + "b", name));
  EXPECT_FALSE(matches_fqn(levels + "b", path + "a"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(FqnPattern, RenamesByWhatWildcardsStandFor) {
  const auto renamed = [](const char* from, const char* to, const char* fqn) {
    return detail::renamed_fqn(from, to, fqn).value_or("none");
  };
  EXPECT_EQ(renamed("blocks.*.norm[12].*", "layers.*.ln_[12].*", "blocks.10.norm2.bias"),
            "layers.10.ln_2.bias");
  EXPECT_EQ(renamed("model.**", "**", "model.a.b.weight"), "a.b.weight");
  EXPECT_EQ(renamed("**.gamma", "**.weight", "gamma"), "weight");
  EXPECT_EQ(renamed("**.gamma", "**.weight", "a.b.gamma"), "a.b.weight");
  EXPECT_EQ(renamed("a.**.w.**", "b.**.v.**", "a.w.x.w.y"), "b.v.x.w.y");
  EXPECT_EQ(renamed("l*_*.?", "m*-*.?", "l1_2_3.x"), "m1-2_3.x");
  EXPECT_EQ(renamed("a.*.w", "b.*.w", "a.w"), "none");
  EXPECT_EQ(renamed("head.*", "", "head.bias"), "");
  EXPECT_EQ(renamed("plain", "other", "plain"), "other");
}

TEST(FqnPattern, RefusesToRenameToOtherWildcards) {
  EXPECT_ERROR(detail::renamed_fqn("a.*", "b.**", "x"), "'a.*'", "'b.**'",
               "wildcards are not those");
  EXPECT_ERROR(detail::renamed_fqn("a", "b.*", "x"), "wildcards are not those");
  EXPECT_ERROR(detail::renamed_fqn("a.[12].*", "b.*", "x"), "wildcards are not those");
}

}  // namespace
}  // namespace tessera::nn

#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {

namespace {

Family reductions() {
  Family f{"reductions", {}};
  f.add("sum", {{{8, 6}}}, [](auto& t) { return t[0].sum(); },
        {"S0 | P | - | R | -", "S1 | P | - | R | -", "P | P | - | R | -",
         "S0,S1 | P,P | - | R,R | -"});
  f.add("sum(0)", {{{8, 6}}}, [](auto& t) { return t[0].sum(0); },
        {"S0 | P | - | R | -", "S1 | S0 | - | S1 | -", "S0,S1 | P,S0 | - | R,S1 | -"});
  f.add("mean", {{{7, 6}}}, [](auto& t) { return t[0].mean(); },
        {"S0 | P | - | R | -", "S1 | P | - | R | -", "P | P | - | R | -",
         "S0,S0 | P,P | - | R,R | -"});
  f.add("mean(-1)", {{{8, 6}}}, [](auto& t) { return t[0].mean(-1); },
        {"S0 | S0 | - | S0 | -", "S1 | P | - | R | -"});
  f.add("prod", {{{8, 3}}}, [](auto& t) { return t[0].prod(0); },
        {"S1 | S0 | - | S1 | all_reduce 8"});
  f.add("amax(0)", {{{8, 6}}}, [](auto& t) { return t[0].amax(0); },
        {"S0 | Pmax | - | S0 | 2 all_reduce 96", "S1 | S0 | - | S1 | -",
         "S0,S1 | Pmax,S0 | - | S0,S1 | 2 all_reduce 48"});
  f.add("max", {{{8, 6}}}, [](auto& t) { return t[0].max(); },
        {"S0 | Pmax | -", "S0,S1 | Pmax,Pmax | -"});
  f.add("any(0)", {{{8, 6}, Operand::kMask}}, [](auto& t) { return t[0].any(0); },
        {"S0 | Pmax | -", "S1 | S0 | -"});
  f.add("max.dim(0)", {{{8, 6}}},
        [](auto& t) {
          const auto [values, indices] = t[0].max(0);
          return Tensors{values, indices};
        },
        {"S1 | S0 S0 | - | S1 | -"});
  f.add("argmax(0)", {{{8, 6}}}, [](auto& t) { return t[0].argmax(0); }, {"S1 | S0 | -"});
  return f;
}

Family norms() {
  Family f{"norms", {}};
  f.add("norm", {{{8, 6}}}, [](auto& t) { return t[0].norm(); },
        {"S0 | R | all_reduce 8 | S0 | -", "S0,S1 | R,R | all_reduce 8 | S0,S1 | -"});
  f.add("vector_norm(2, -1)", {{{8, 6}}},
        [](auto& t) { return at::linalg_vector_norm(t[0], 2, at::IntArrayRef{-1}); },
        {"S0 | S0 | - | S0 | -", "S1 | R | all_reduce 64 | S1 | -"});
  f.add("vector_norm(3, 0)", {{{8, 6}}},
        [](auto& t) { return at::linalg_vector_norm(t[0], 3, at::IntArrayRef{0}); },
        {"S1 | S0 | - | S1 | -", "S0 | R | all_reduce 48 | S0 | -"});
  return f;
}

Family along() {
  Family f{"sort, topk, cumulative", {}};
  f.add("sort(-1)", {{{8, 6}}},
        [](auto& t) {
          const auto [values, indices] = t[0].sort(-1);
          return Tensors{values, indices};
        },
        {"S0 | S0 S0 | - | S0 | -", "S1 | R R | all_gather 128 | R | -",
         "S0,S0 | S0,S0 S0,S0 | - | S0,S0 | -"});
  f.add("sort(-1), out=", {{{8, 6}}},
        [](auto& t) {
          auto values = at::zeros_like(t[0]);
          auto indices = at::zeros_like(t[0], at::kLong);
          at::sort_out(values, indices, t[0].detach(), -1);
          return Tensors{values, indices};
        },
        {"S0 | S0 S0 | -"});
  f.add("topk(2, -1)", {{{8, 6}}},
        [](auto& t) {
          const auto [values, indices] = t[0].topk(2, -1);
          return Tensors{values, indices};
        },
        {"S0 | S0 S0 | - | S0 | -", "S1 | R R | all_gather 128 | R | -"});
  f.add("cumsum(-1)", {{{8, 6}}}, [](auto& t) { return t[0].cumsum(-1); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -", "S1 | R | all_gather 128 | R | -"});
  f.add("cumprod(-1)", {{{8, 6}, Operand::kPositive}}, [](auto& t) { return t[0].cumprod(-1); },
        {"S0 | S0 | - | S0 | all_reduce 1"});
  f.add("flip(-1)", {{{8, 6}}}, [](auto& t) { return t[0].flip(-1); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -"});
  return f;
}

}  // namespace

std::vector<Family> reduction_families() {
  return {reductions(), norms(), along()};
}

namespace {

Tensors clones(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

}  // namespace

std::vector<Family> optimizer_families() {
  const Operand matrix{{8, 6}}, vector{{6}};
  Family f{"foreach", {}};
  f.add("_foreach_add_", {matrix, vector, matrix, vector},
        [](auto& t) {
          const auto all = clones(t);
          const Tensors lists[] = {{all[0], all[1]}, {all[2], all[3]}};
          at::_foreach_add_(lists[0], lists[1], 0.5);
          return lists[0];
        },
        {"S0 R S0 R | S0 R | -", "S0 S0 S0 S0 | S0 S0 | -",
         "S0,S1 R,S0 S0,S1 R,S0 | S0,S1 R,S0 | -"});
  f.add("_foreach_mul_", {matrix, vector},
        [](auto& t) {
          const auto all = clones(t);
          at::_foreach_mul_(all, 0.5);
          return all;
        },
        {"S0 R | S0 R | -", "P P | P P | -"});
  f.add("_foreach_addcdiv_", {matrix, matrix, {{8, 6}, Operand::kPositive}},
        [](auto& t) {
          const auto all = clones(t);
          at::_foreach_addcdiv_({all[0]}, {all[1]}, {all[2]}, -0.1);
          return all[0];
        },
        {"S0 S0 S0 | S0 | -"});
  return {f};
}

}  // namespace tessera::testing

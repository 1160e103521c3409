// Gathering, scattering, indexing, embedding.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {
namespace {

using List = c10::List<std::optional<at::Tensor>>;

List list(std::initializer_list<at::Tensor> tensors) {
  List result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return result;
}

Operand indices(Sizes sizes, std::int64_t limit) {
  return {std::move(sizes), Operand::kIndices, limit};
}

Family indexing() {
  return {"gather, scatter, index",
          {
              {"gather(1)",
               {{{8, 6}}, indices({8, 3}, 6)},
               [](auto& t) { return Tensors{t[0].gather(1, t[1])}; },
               {{"S0 S0", "S0", "-", "S0", "-"},
                {"R S1", "S1", "-", "P", "-"},
                {"P R", "P", "-", "R", "-"}}},
              {"gather(0)",
               {{{8, 6}}, indices({1, 6}, 8)},
               [](auto& t) { return Tensors{t[0].gather(0, t[1])}; },
               {{"S0 R", "P", "-", "R", "-"}, {"S1 S1", "S1", "-", "S1", "-"}}},
              {"scatter(1)",
               {{{8, 6}}, indices({8, 1}, 6), {{8, 1}}},
               [](auto& t) { return Tensors{t[0].scatter(1, t[1], t[2])}; },
               {{"S0 S0 S0", "S0", "-", "S0 S0", "-"}}},
              {"scatter_add(1)",
               {{{8, 6}}, indices({8, 4}, 6), {{8, 4}}},
               [](auto& t) { return Tensors{t[0].scatter_add(1, t[1], t[2])}; },
               {{"S0 S0 S0", "S0", "-", "S0 S0", "-"}, {"R S1 S1", "P", "-", "R S1", "-"}}},
              {"index_select(1)",
               {{{8, 6}}, indices({4}, 6)},
               [](auto& t) { return Tensors{t[0].index_select(1, t[1])}; },
               {{"S0 R", "S0", "-", "S0", "-"},
                {"R S0", "S1", "-", "P", "-"},
                {"P R", "P", "-", "R", "-"}}},
              {"index_add(1)",
               {{{8, 6}}, indices({4}, 6), {{8, 4}}},
               [](auto& t) { return Tensors{t[0].index_add(1, t[1], t[2])}; },
               {{"S0 R S0", "S0", "-", "S0 S0", "-"}, {"R S0 S1", "P", "-", "R S1", "-"}}},
              {"x[:, i]",
               {{{8, 6}}, indices({4}, 6)},
               [](auto& t) { return Tensors{at::index(t[0], list({{}, t[1]}))}; },
               {{"S0 R", "S0", "-", "S0", "-"}, {"R S0", "S1", "-", "P", "-"}}},
              {"x[i]",
               {{{8, 6}}, indices({4}, 8)},
               [](auto& t) { return Tensors{at::index(t[0], list({t[1]}))}; },
               {{"S1 R", "S1", "-", "S1", "-"}, {"R S0", "S0", "-", "P", "-"}}},
              {"x[:, mask]",
               {{{8, 6}}, {{6}, Operand::kMask}},
               [](auto& t) { return Tensors{at::index(t[0], list({{}, t[1]}))}; },
               {{"S0 R", "S0", "-", "S0", "-"}, {"S0,R R,R", "S0,R", "-", "S0,R", "-"}}},
              {"x[mask]",
               {{{8, 6}}, {{8}, Operand::kMask}},
               [](auto& t) { return Tensors{at::index(t[0], list({t[1]}))}; },
               {{"S1 R", "S1", "-", "S1", "-"}}},
              {"index_put(:, i)",
               {{{8, 6}}, indices({2}, 6), {{8, 2}}},
               [](auto& t) { return Tensors{at::index_put(t[0], list({{}, t[1]}), t[2], true)}; },
               {{"S0 R S0", "S0", "-", "S0 S0", "-"}}},
              {"take",
               {{{8, 6}}, indices({4}, 48)},
               [](auto& t) { return Tensors{at::take(t[0], t[1])}; },
               {{"R S0", "S0", "-", "P", "-"}}},
          }};
}

Family embedding() {
  return {"embedding",
          {
              {"embedding",
               {{{8, 6}}, indices({4, 5}, 8)},
               [](auto& t) { return Tensors{at::embedding(t[0], t[1])}; },
               {{"R S0", "S0", "-", "P", "-"},
                {"S1 R", "S2", "-", "S1", "-"},
                {"S0 R", "P", "-", "R", "-"},
                {"S1,R R,S0", "S2,S0", "-", "S1,P", "-"},
                {"R,S0 S0,R", "S0,P", "-", "P,R", "-"}}},
              {"_embedding_bag",
               {{{8, 6}}, indices({5}, 8)},
               [](auto& t) {
                 const auto offsets = t[1].slice(0, 0, 1).mul(0);
                 return Tensors{std::get<0>(at::embedding_bag(t[0], t[1], offsets))};
               },
               {{"S1 R", "S1", "-", "S1", "-"}}},
          }};
}

}  // namespace

std::vector<Family> indexing_families() {
  return {indexing(), embedding()};
}

}  // namespace tessera::testing

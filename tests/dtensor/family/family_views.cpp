// Views, joining and splitting.
#include <ATen/ATen.h>

#include "family_table.h"

namespace tessera::testing {
namespace {

Family views() {
  return {
      "views",
      {
          {"view: flatten",
           {{{4, 8, 6}}},
           [](auto& t) { return Tensors{t[0].view({32, 6})}; },
           {{"S0", "S0", "-", "S0", "-"},
            {"S1", "_StridedShard(dim=0, sf=4)", "-", "S1", "-"},
            {"S2", "S1", "-", "S2", "-"},
            {"P", "P", "-", "R", "-"},
            {"S0,S1", "S0,_StridedShard(dim=0, sf=2)", "-", "S0,S1", "-"}}},
          {"view: unflatten",
           {{{8, 12}}},
           [](auto& t) { return Tensors{t[0].view({8, 4, 3})}; },
           {{"S0", "S0", "-", "S0", "-"},
            {"S1", "S1", "-", "S1", "-"},
            {"S0,S1", "S0,S1", "-", "S0,S1", "-"}}},
          {"reshape of a transpose",
           {{{4, 6, 8}}},
           [](auto& t) { return Tensors{t[0].transpose(1, 2).reshape({4, 48})}; },
           {{"S0", "S0", "-", "S0", "-"}, {"S2", "S1", "-", "S2", "-"}}},
          {"flatten",
           {{{4, 8}}},
           [](auto& t) { return Tensors{t[0].flatten()}; },
           {{"S0", "S0", "-", "S0", "-"},
            {"S1", "_StridedShard(dim=0, sf=4)", "-", "S1", "-"},
            {"S0,S1", "S0,_StridedShard(dim=0, sf=2)", "-", "S0,S1", "-"}}},
          {"permute",
           {{{4, 8, 6}}},
           [](auto& t) { return Tensors{t[0].permute({2, 0, 1})}; },
           {{"S0", "S1", "-", "S0", "-"},
            {"S1", "S2", "-", "S1", "-"},
            {"P", "P", "-", "R", "-"},
            {"S1,S0", "S2,S1", "-", "S1,S0", "-"}}},
          {"t",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].t()}; },
           {{"S0", "S1", "-", "S0", "-"}, {"S1", "S0", "-", "S1", "-"}}},
          {"squeeze",
           {{{8, 1, 6}}},
           [](auto& t) { return Tensors{t[0].squeeze(1)}; },
           {{"S0", "S0", "-", "S0", "-"}, {"S2", "S1", "-", "S2", "-"}, {"P", "P", "-", "R", "-"}}},
          {"unsqueeze",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].unsqueeze(1)}; },
           {{"S0", "S0", "-", "S0", "-"}, {"S1", "S2", "-", "S1", "-"}}},
          {"expand",
           {{{8, 1}}},
           [](auto& t) { return Tensors{t[0].expand({8, 6})}; },
           {{"S0", "S0", "-", "S0", "-"}}},
          {"repeat",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].repeat({1, 2})}; },
           {{"S0", "S0", "-", "S0", "-"}}},
          {"unfold",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].unfold(1, 3, 2)}; },
           {{"S0", "S0", "-", "S0", "-"}}},
          {"select",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].select(1, 2)}; },
           {{"S0", "S0", "-", "S0", "-"}, {"P", "P", "-", "R", "-"}}},
          {"slice",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].slice(1, 1, 5)}; },
           {{"S0", "S0", "-", "S0", "-"}, {"P", "P", "-", "R", "-"}}},
          {"slice of a split dimension",
           {{{8, 6}}},
           [](auto& t) { return Tensors{t[0].slice(0, 1, 5)}; },
           {{"S0", "R", "all_gather 96", "R", "-"}}},
          {"diagonal",
           {{{4, 6, 6}}},
           [](auto& t) { return Tensors{t[0].diagonal(0, 1, 2)}; },
           {{"S0", "S0", "-", "S0", "-"}}},
          {"view_as_complex, view_as_real",
           {{{8, 6, 2}}},
           [](auto& t) { return Tensors{at::view_as_real(at::view_as_complex(t[0]))}; },
           {{"S0", "S0", "-", "S0", "-"}, {"S1", "S1", "-", "S1", "-"}}},
          {"t_, transpose_, squeeze_, unsqueeze_",
           {{{8, 1, 6}}},
           [](auto& t) {
             auto all = t[0].clone();
             all.squeeze_(1).t_().unsqueeze_(0).transpose_(0, 2);
             return Tensors{all};
           },
           {{"S0", "S0", "-"}, {"S2", "S1", "-"}},
           false},
      }};
}

Family joining() {
  return {"cat, stack, split",
          {
              {"cat",
               {{{8, 6}}, {{8, 4}}},
               [](auto& t) { return Tensors{at::cat({t[0], t[1]}, 1)}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S0 R", "S0", "-", "S0 S0", "-"},
                {"P P", "P", "-", "R R", "-"},
                {"S0,S0 S0,S0", "S0,S0", "-", "S0,S0 S0,S0", "-"}}},
              {"cat of equal parts",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{at::cat({t[0], t[1]}, 0)}; },
               {{"S1 S1", "S1", "-", "S1 S1", "-"},
                {"S0 S0", "_StridedShard(dim=0, sf=2)", "-", "S0 S0", "-"},
                {"S0 R", "_StridedShard(dim=0, sf=2)", "-", "S0 S0", "-"}}},
              {"stack",
               {{{8, 6}}, {{8, 6}}},
               [](auto& t) { return Tensors{at::stack({t[0], t[1]}, -1)}; },
               {{"S0 S0", "S0", "-", "S0 S0", "-"},
                {"S1 S1", "S1", "-", "S1 S1", "-"},
                {"P P", "P", "-", "R R", "-"}}},
              {"split",
               {{{8, 6}}},
               [](auto& t) { return t[0].split(4, 1); },
               {{"S0", "S0 S0", "-", "S0", "-"}, {"P", "P P", "-", "R", "-"}}},
              {"chunk",
               {{{8, 6}}},
               [](auto& t) { return t[0].chunk(2, 1); },
               {{"S0", "S0 S0", "-", "S0", "-"}}},
              {"split_with_sizes",
               {{{8, 6}}},
               [](auto& t) { return t[0].split_with_sizes({1, 2, 3}, 1); },
               {{"S0", "S0 S0 S0", "-", "S0", "-"}}},
              {"unbind",
               {{{8, 2}}},
               [](auto& t) { return t[0].unbind(1); },
               {{"S0", "S0 S0", "-", "S0", "-"}, {"P", "P P", "-", "R", "-"}}},
          }};
}

}  // namespace

std::vector<Family> view_families() {
  return {views(), joining()};
}

}  // namespace tessera::testing

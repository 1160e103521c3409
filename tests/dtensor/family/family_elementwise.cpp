#include <ATen/ATen.h>

#include "family_table.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::testing {

namespace {

Family pointwise() {
  Family f{"pointwise", {}};
  f.add("silu", {{{8, 6}}}, [](auto& t) { return at::silu(t[0]); },
        {"S0 | S0 | - | S0 | -", "S1 | S1 | - | S1 | -", "R | R | - | R | -",
         "P | R | all_reduce 384 | R | all_reduce 384", "S0,S1 | S0,S1 | - | S0,S1 | -",
         "S0,S0 | S0,S0 | - | S0,S0 | -"});
  f.add("add", {{{8, 8}}, {{8, 8}}}, [](auto& t) { return t[0] + t[1]; },
        {"S0 S0 | S0 | - | S0 S0 | -", "S0 R | S0 | - | S0 S0 | -", "R S1 | S1 | - | S1 S1 | -",
         "P P | P | - | R R | -", "P R | P | - | R R | -",
         "P S0 | S0 | reduce_scatter 512 | S0 S0 | -", "S0 S1 | S0 | all_to_all 128 | S0 S0 | -",
         "S0,S1 S0,S1 | S0,S1 | - | S0,S1 S0,S1 | -"});
  f.add("add, broadcast", {{{8, 6}}, {{6}}}, [](auto& t) { return t[0] + t[1]; },
        {"S0 R | S0 | - | S0 P | -", "S1 S0 | S1 | - | S1 S0 | -", "S1 R | S1 | - | S1 S0 | -",
         "S0,S1 R,S0 | S0,S1 | - | S0,S1 P,S0 | -"});
  f.add("mul", {{{8, 6}}, {{8, 6}}}, [](auto& t) { return t[0] * t[1]; },
        {"S0 S0 | S0 | - | S0 S0 | -", "S0 R | S0 | - | S0 S0 | -", "P R | P | - | R P | -",
         "S1,P S1,R | S1,P | - | S1,R S1,P | -"});
  f.add("div", {{{8, 6}}, {{8, 6}, Operand::kPositive}}, [](auto& t) { return t[0] / t[1]; },
        {"S0 S0 | S0 | - | S0 S0 | -", "P R | P | - | R P | -"});
  f.add("pow", {{{8, 6}}}, [](auto& t) { return t[0].pow(2); },
        {"S0 | S0 | - | S0 | -", "P | R | all_reduce 384 | R | all_reduce 384"});
  f.add("add_ in place", {{{8, 6}}, {{8, 6}}}, [](auto& t) { return t[0].clone().add_(t[1]); },
        {"S0 S0 | S0 | - | S0 S0 | -", "S0 R | S0 | - | S0 S0 | -",
         "S0 P | S0 | reduce_scatter 384 | S0 S0 | -", "P P | P | - | R R | -"});
  f.add("exp, out=", {{{8, 6}}, {{8, 6}}},
        [](auto& t) {
          auto out = t[1].detach().clone();
          return at::exp_out(out, t[0].detach());
        },
        {"S0 S0 | S0 | -", "S1 S1 | S1 | -"});
  return f;
}

Family masking() {
  Family f{"where, masked_fill, tril, triu", {}};
  f.add("where", {{{8, 6}, Operand::kMask}, {{8, 6}}, {{8, 6}}},
        [](auto& t) { return at::where(t[0], t[1], t[2]); },
        {"S0 S0 S0 | S0 | - | S0 S0 | -", "S1 S1 R | S1 | - | S1 S1 | -", "R P P | P | - | R R | -",
         "S0,S1 S0,S1 S0,S1 | S0,S1 | - | S0,S1 S0,S1 | -"});
  f.add("masked_fill", {{{8, 6}}, {{8, 6}, Operand::kMask}},
        [](auto& t) { return t[0].masked_fill(t[1], 0.0); },
        {"S0 S0 | S0 | - | S0 | -", "S1 R | S1 | - | S1 | -", "P R | P | - | R | -"});
  f.add("tril", {{{4, 8, 6}}}, [](auto& t) { return t[0].tril(); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -"});
  return f;
}

Family copies() {
  Family f{"copy_, to, clone, detach", {}};
  f.add("clone", {{{8, 6}}}, [](auto& t) { return t[0].clone(); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -", "S0,P | S0,P | - | S0,R | -"});
  f.add("detach", {{{8, 6}}}, [](auto& t) { return t[0].detach(); }, {"S0 | S0 | -", "P | P | -"});
  f.add("to(float).to(double)", {{{8, 6}}},
        [](auto& t) { return t[0].round().to(at::kFloat).to(at::kDouble); },
        {"S0 | S0 | - | S0 | -", "S0,S1 | S0,S1 | - | S0,S1 | -"});
  f.add("contiguous of a transpose", {{{8, 6}}}, [](auto& t) { return t[0].t().contiguous(); },
        {"S0 | S1 | - | S0 | -", "P | P | - | R | -"});
  f.add("copy_", {{{8, 6}}, {{8, 6}}}, [](auto& t) { return t[0].clone().copy_(t[1]); },
        {"S0 S0 | S0 | - | S0 S0 | -", "S0 R | S0 | - | S0 S0 | -",
         "S0 P | S0 | reduce_scatter 384 | S0 S0 | -", "P P | P | - | R R | -"});
  f.add("zero_", {{{8, 6}}}, [](auto& t) { return t[0].clone().zero_(); },
        {"S0 | S0 | -", "P | P | -"});
  f.add("zeros_like", {{{8, 6}}}, [](auto& t) { return at::zeros_like(t[0]); },
        {"S0 | S0 | -", "P | R | -"});
  return f;
}

Family random_numbers() {
  Family f{"random", {}};
  f.add("dropout", {{{8, 6}}}, [](auto& t) { return at::dropout(t[0], 0.5, true); },
        {"S0 | S0 | - | S0 | -", "S1 | S1 | - | S1 | -", "S0,S1 | S0,S1 | - | S0,S1 | -",
         "S0,S0 | S0,S0 | - | S0,S0 | -"})
      .random = true;
  f.add("uniform_, normal_, bernoulli_", {{{7, 6}}},
        [](auto& t) {
          return Tensors{t[0].clone().uniform_(-1, 1), t[0].clone().normal_(),
                         t[0].clone().bernoulli_(0.3)};
        },
        {"S0 | S0 S0 S0 | -", "S1 | S1 S1 S1 | -"})
      .random = true;
  return f;
}

}  // namespace

std::vector<Family> elementwise_families() {
  return {pointwise(), masking(), copies(), random_numbers()};
}

namespace {

Family views() {
  Family f{"views", {}};
  f.add("view: flatten", {{{4, 8, 6}}}, [](auto& t) { return t[0].view({32, 6}); },
        {"S0 | S0 | - | S0 | -", "S1 | _StridedShard(dim=0, sf=4) | - | S1 | -",
         "S2 | S1 | - | S2 | -", "P | P | - | R | -",
         "S0,S1 | S0,_StridedShard(dim=0, sf=2) | - | S0,S1 | -"});
  f.add("view: unflatten", {{{8, 12}}}, [](auto& t) { return t[0].view({8, 4, 3}); },
        {"S0 | S0 | - | S0 | -", "S1 | S1 | - | S1 | -", "S0,S1 | S0,S1 | - | S0,S1 | -"});
  f.add("reshape of a transpose", {{{4, 6, 8}}},
        [](auto& t) { return t[0].transpose(1, 2).reshape({4, 48}); },
        {"S0 | S0 | - | S0 | -", "S2 | S1 | - | S2 | -"});
  f.add("permute", {{{4, 8, 6}}}, [](auto& t) { return t[0].permute({2, 0, 1}); },
        {"S0 | S1 | - | S0 | -", "S1 | S2 | - | S1 | -", "P | P | - | R | -",
         "S1,S0 | S2,S1 | - | S1,S0 | -"});
  f.add("t", {{{8, 6}}}, [](auto& t) { return t[0].t(); },
        {"S0 | S1 | - | S0 | -", "S1 | S0 | - | S1 | -"});
  f.add("squeeze", {{{8, 1, 6}}}, [](auto& t) { return t[0].squeeze(1); },
        {"S0 | S0 | - | S0 | -", "S2 | S1 | - | S2 | -", "P | P | - | R | -"});
  f.add("unsqueeze", {{{8, 6}}}, [](auto& t) { return t[0].unsqueeze(1); },
        {"S0 | S0 | - | S0 | -", "S1 | S2 | - | S1 | -"});
  f.add("expand", {{{8, 1}}}, [](auto& t) { return t[0].expand({8, 6}); },
        {"S0 | S0 | - | S0 | -"});
  f.add("select", {{{8, 6}}}, [](auto& t) { return t[0].select(1, 2); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -"});
  f.add("slice", {{{8, 6}}}, [](auto& t) { return t[0].slice(1, 1, 5); },
        {"S0 | S0 | - | S0 | -", "P | P | - | R | -"});
  f.add("slice of a split dimension", {{{8, 6}}}, [](auto& t) { return t[0].slice(0, 1, 5); },
        {"S0 | R | all_gather 96 | R | -"});
  f.add("view_as_complex, view_as_real", {{{8, 6, 2}}},
        [](auto& t) { return at::view_as_real(at::view_as_complex(t[0])); },
        {"S0 | S0 | - | S0 | -", "S1 | S1 | - | S1 | -"});
  f.add("t_, transpose_, squeeze_, unsqueeze_", {{{8, 1, 6}}},
        [](auto& t) {
          auto all = t[0].clone();
          all.squeeze_(1).t_().unsqueeze_(0).transpose_(0, 2);
          return all;
        },
        {"S0 | S0 | -", "S2 | S1 | -"});
  return f;
}

Family joining() {
  Family f{"cat, stack, split", {}};
  f.add("cat", {{{8, 6}}, {{8, 4}}}, [](auto& t) { return at::cat({t[0], t[1]}, 1); },
        {"S0 S0 | S0 | - | S0 S0 | -", "S0 R | S0 | - | S0 S0 | -", "P P | P | - | R R | -",
         "S0,S0 S0,S0 | S0,S0 | - | S0,S0 S0,S0 | -"});
  f.add("cat of equal parts", {{{8, 6}}, {{8, 6}}},
        [](auto& t) { return at::cat({t[0], t[1]}, 0); },
        {"S1 S1 | S1 | - | S1 S1 | -", "S0 S0 | _StridedShard(dim=0, sf=2) | - | S0 S0 | -",
         "S0 R | _StridedShard(dim=0, sf=2) | - | S0 S0 | -"});
  f.add("stack", {{{8, 6}}, {{8, 6}}}, [](auto& t) { return at::stack({t[0], t[1]}, -1); },
        {"S0 S0 | S0 | - | S0 S0 | -", "S1 S1 | S1 | - | S1 S1 | -", "P P | P | - | R R | -"});
  f.add("split", {{{8, 6}}}, [](auto& t) { return t[0].split(4, 1); },
        {"S0 | S0 S0 | - | S0 | -", "P | P P | - | R | -"});
  f.add("unbind", {{{8, 2}}}, [](auto& t) { return t[0].unbind(1); },
        {"S0 | S0 S0 | - | S0 | -", "P | P P | - | R | -"});
  return f;
}

}  // namespace

std::vector<Family> view_families() {
  return {views(), joining()};
}

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
  Family f{"gather, scatter, index", {}};
  f.add("gather(1)", {{{8, 6}}, indices({8, 3}, 6)}, [](auto& t) { return t[0].gather(1, t[1]); },
        {"S0 S0 | S0 | - | S0 | -", "P R | P | - | R | -"});
  f.add("gather(0)", {{{8, 6}}, indices({1, 6}, 8)}, [](auto& t) { return t[0].gather(0, t[1]); },
        {"S0 R | P | - | R | -", "S1 S1 | S1 | - | S1 | -"});
  f.add("scatter(1)", {{{8, 6}}, indices({8, 1}, 6), {{8, 1}}},
        [](auto& t) { return t[0].scatter(1, t[1], t[2]); }, {"S0 S0 S0 | S0 | - | S0 S0 | -"});
  f.add("scatter_add(1)", {{{8, 6}}, indices({8, 4}, 6), {{8, 4}}},
        [](auto& t) { return t[0].scatter_add(1, t[1], t[2]); },
        {"S0 S0 S0 | S0 | - | S0 S0 | -", "R S1 S1 | P | - | R S1 | -"});
  f.add("index_select(1)", {{{8, 6}}, indices({4}, 6)},
        [](auto& t) { return t[0].index_select(1, t[1]); },
        {"S0 R | S0 | - | S0 | -", "P R | P | - | R | -"});
  f.add("index_add(1)", {{{8, 6}}, indices({4}, 6), {{8, 4}}},
        [](auto& t) { return t[0].index_add(1, t[1], t[2]); },
        {"S0 R S0 | S0 | - | S0 S0 | -", "R S0 S1 | P | - | R S1 | -"});
  f.add("x[:, i]", {{{8, 6}}, indices({4}, 6)},
        [](auto& t) { return at::index(t[0], list({{}, t[1]})); }, {"S0 R | S0 | - | S0 | -"});
  f.add("index_put(:, i)", {{{8, 6}}, indices({2}, 6), {{8, 2}}},
        [](auto& t) { return at::index_put(t[0], list({{}, t[1]}), t[2], true); },
        {"S0 R S0 | S0 | - | S0 S0 | -"});
  return f;
}

Family embedding() {
  Family f{"embedding", {}};
  f.add("embedding", {{{8, 6}}, indices({4, 5}, 8)},
        [](auto& t) { return at::embedding(t[0], t[1]); },
        {"R S0 | S0 | - | P | -", "S1 R | S2 | - | S1 | -", "S0 R | P | - | R | -",
         "S1,R R,S0 | S2,S0 | - | S1,P | -", "R,S0 S0,R | S0,P | - | P,R | -"});
  return f;
}

}  // namespace

std::vector<Family> indexing_families() {
  return {indexing(), embedding()};
}

}  // namespace tessera::testing

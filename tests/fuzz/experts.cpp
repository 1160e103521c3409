#include "fuzz/experts.h"

#include <ATen/ops/einsum.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

namespace tessera::fuzz {
namespace {

constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kChosen = 2;

}  // namespace

Experts::Experts(std::int64_t dim, std::int64_t inner, Activation activation)
    : activation_(std::move(activation)),
      router_(linear_layer(LinearKind::kOwn, dim, kExperts, false)) {
  register_module("router", router_.module);
  up_ = register_slot("up", {kExperts, dim, inner});
  down_ = register_slot("down", {kExperts, inner, dim});
}

std::vector<at::Tensor> Experts::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.dim() == 3 ? x.flatten(0, 1) : x;
  const at::Tensor scores = router_(tokens);
  const auto [best, chosen] = scores.softmax(-1).topk(kChosen, -1);
  const at::Tensor gates = at::zeros_like(scores).scatter(-1, chosen, best);
  // The tokens first, as random operators are to find them.
  const at::Tensor inner = activation_(at::einsum("td,edi->tei", {tokens, *up_}));
  const at::Tensor each = at::einsum("tei,eid->ted", {inner, *down_});
  const at::Tensor y = (each * gates.unsqueeze(-1)).sum(1);
  return {y.view(x.sizes()), scores.logsumexp(-1).square().sum()};
}

}  // namespace tessera::fuzz

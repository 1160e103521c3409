#include "drop_by_element.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "autograd_functions.h"
#include "below_autograd.h"
#include "distributed_impl.h"
#include "implicit_count.h"
#include "leaf_gradient.h"
#include "redistribute.h"
#include "seeded_generator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/policy.h"
#include "tessera/dtensor/random.h"

namespace tessera::detail {
namespace {

struct Dropped {
  at::Tensor result;
  at::Tensor kept;  ///< as bool
};

Dropped drop(const at::Tensor& local, const ShardingSpec& spec, c10::IntArrayRef sizes, double p) {
  const auto kept = at::empty_like(local);
  const auto key = next_random_key();
  if (!kept.is_meta()) bernoulli_(make_distributed(kept, spec, sizes.vec()), 1 - p, key);
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  return {local.mul(kept).mul_(scale), kept.to(at::kBool)};
}

Dropped keep_all(const at::Tensor& local) {
  return {local.clone(), at::ones_like(local, at::kBool)};
}

}  // namespace

bool drop_by_element(const OperatorInfo& info, torch::jit::Stack& stack) {
  if (info.name != "aten::native_dropout") return false;
  const at::Tensor x = torch::jit::peek(stack, 0, 3).toTensor();
  const double p = torch::jit::peek(stack, 1, 3).toDouble();
  const bool trains = torch::jit::peek(stack, 2, 3).toOptional<bool>().value_or(true);
  auto* impl = as_distributed(x);
  if (impl == nullptr || !x.is_floating_point()) return false;
  const auto spec = impl->spec();
  const bool partial = spec->sharding.layout->is_partial();
  if (partial && is_strict()) return false;
  if (impl->detached_view() && impl->detached_view()->is_stale()) return false;
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout with probability ", p,
                " was asked for; it must be in [0, 1]");

  keep_gradient_layout(*impl, x);
  const ShardingSpec settled{spec->sharding.mesh, gradient_layout(spec->sharding.layout)};
  const BelowAutograd guard;
  if (partial) count_implicit_redistribution();
  const auto local = redistribute_local(impl->local(), spec, settled.layout);
  auto [result, kept] = trains && p > 0 ? drop(local, settled, spec->sizes, p) : keep_all(local);
  torch::jit::drop(stack, 3);
  torch::jit::push(stack, make_distributed(result, settled, spec->sizes),
                   make_distributed(kept, settled, spec->sizes));
  return true;
}

}  // namespace tessera::detail

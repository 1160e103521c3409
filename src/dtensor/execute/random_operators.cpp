// The random operators of at:: that draw by the global element instead of gathering. Each takes the
// next key of the thread's sequence (seeded_generator.h), whatever the layout, so that the numbers
// don't depend on the mesh. The other random operators run whole on every rank, under a
// SeededGenerator. What is here is for distributed tensors; plain_random.cpp has plain ones.

#include "execute/random_operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include <vector>

#include "autograd/leaf_gradient.h"
#include "operators/bound_call.h"
#include "random/fills.h"
#include "random/seeded_generator.h"
#include "rank/below_autograd.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/distribution.h"
#include "views/view_writes.h"

namespace tessera::detail {
namespace {

/// A pending reduction has no elements yet: fills the tensor that it reduces to.
void fill_partial(const at::Tensor& self, const PlannedCall& call, RandomKey key) {
  const DistributedTensorImpl& impl = *as_distributed(self);
  const TensorSpec& spec = *impl.spec();
  const ShardingSpec settled{spec.sharding.mesh, gradient_layout(spec.sharding.layout)};
  const auto values = make_distributed(
      at::empty(local_sizes(settled, spec.sizes), impl.local().options()), settled, spec.sizes);
  const at::Tensor& local = local_tensor(values);
  const RandomPlace place = random_place({call.info.name, values, random_source(), key});
  call.info.traits.fill()({local, place, key}, call.arguments());
  // Terms that reduce to the numbers; making them is local.
  impl.local().copy_(
      redistribute_local(local, as_distributed(values)->spec(), spec.sharding.layout));
}

void fill_distributed(const at::Tensor& self, const PlannedCall& call, RandomKey key) {
  const DistributedTensorImpl& impl = *as_distributed(self);
  if (impl.spec()->sharding.layout->is_partial()) {
    return fill_partial(self, call, key);
  }
  const RandomPlace place = random_place({call.info.name, self, random_source(), key});
  call.info.traits.fill()({impl.local(), place, key}, call.arguments());
}

struct Dropped {
  at::Tensor result;
  at::Tensor kept;  ///< as bool
};

/// The mask is drawn into the local tensor by its elements' places in the whole one.
Dropped drop(const at::Tensor& x, const at::Tensor& local, const ShardingSpec& spec, double p) {
  const auto kept = at::empty_like(local);
  const RandomKey key = next_random_key();
  // Meta tensors take a key too, so that later draws are the same as with data.
  if (!kept.is_meta()) {
    const at::Tensor whole = make_distributed(kept, spec, x.sizes().vec());
    fill_random(kept, random_place({"native_dropout", whole, x, key}), kernels::Bernoulli{1 - p},
                key);
  }
  // With p = 1 nothing is kept, and nothing is to be divided by 0.
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  return {local.mul(kept).mul_(scale), kept.to(at::kBool)};
}

Dropped keep_all(const at::Tensor& local) {
  return {local.clone(), at::ones_like(local, at::kBool)};
}

}  // namespace

void check_rows_together(const PlannedCall& call) {
  const RandomRegionPtr& region = random_region();
  if (region == nullptr || region->rows() == nullptr) {
    return;
  }
  const int generator = call.info.generator;
  if (!call.plan.seeded && (generator < 0 || call.argument(generator).isNone())) {
    return;
  }
  const std::vector<at::Tensor> tensors = bind_call(call.info, call.arguments()).tensors;
  RandomPlace place;
  region->rows()->move(place, {call.info.name, tensors.front(), random_source(), {}},
                       tensors.front().sizes());
  TESSERA_CHECK(!place.is_part, call.info.name, kDrawsInOrder);
}

void run_random_inplace(PlannedCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const DistributedTensorImpl& impl = *as_distributed(self);
  // Before the key is drawn and anything written: a refused call leaves no trace.
  if (impl.detached_view()) {
    check_writable(impl, call.info.name);
  }
  // Drawn for meta tensors as well, so that what follows is the same with and without data.
  const RandomKey key = next_random_key();
  const BelowAutograd guard;
  if (!impl.local().is_meta()) {
    fill_distributed(self, call, key);
    if (impl.detached_view()) {
      write_through(self);
    }
  }
  call.return_results({self});
}

void run_native_dropout(PlannedCall& call) {
  const at::Tensor x = call.argument(0).toTensor();
  const double p = call.argument(1).toDouble();
  const bool trains = call.argument(2).toOptional<bool>().value_or(true);
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout with probability ", p,
                " was asked for; it must be in [0, 1]");
  DistributedTensorImpl& impl = *as_distributed(x);
  // What localize_arguments does for the other kinds of plans.
  check_readable(impl, call.info.name);
  keep_gradient_layout(impl, x);

  const TensorSpecPtr spec = impl.spec();
  // An element of a term is not one of the sum: a pending sum is reduced first.
  const ShardingSpec settled{spec->sharding.mesh, gradient_layout(spec->sharding.layout)};
  const BelowAutograd guard;
  const auto local = redistribute_local(impl.local(), spec, settled.layout);
  const auto [result, kept] = trains && p > 0 ? drop(x, local, settled, p) : keep_all(local);
  call.return_results({make_distributed(result, settled, spec->sizes),
                       make_distributed(kept, settled, spec->sizes)});
}

}  // namespace tessera::detail

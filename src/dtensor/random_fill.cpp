#include "random_fill.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "autograd_functions.h"
#include "below_autograd.h"
#include "distributed_impl.h"
#include "redistribute.h"
#include "seeded_generator.h"
#include "tessera/dtensor/random.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;

struct Fill {
  std::string_view name;
  void (*run)(const at::Tensor& self, Arguments arguments, RandomKey key);
};

constexpr std::array kFills{
    Fill{"aten::uniform_",
         [](const at::Tensor& self, Arguments a, RandomKey key) {
           uniform_(self, a[1].toDouble(), a[2].toDouble(), key);
         }},
    Fill{"aten::normal_",
         [](const at::Tensor& self, Arguments a, RandomKey key) {
           normal_(self, a[1].toDouble(), a[2].toDouble(), key);
         }},
    Fill{"aten::bernoulli_.float", [](const at::Tensor& self, Arguments a,
                                      RandomKey key) { bernoulli_(self, a[1].toDouble(), key); }},
};

/// A pending reduction has no elements of its own: fills the tensor that it stands for.
void fill_partial(const DistributedTensorImpl& impl, const Fill& fill, Arguments arguments,
                  RandomKey key) {
  const auto& spec = *impl.spec();
  const ShardingSpec settled{spec.sharding.mesh, gradient_layout(spec.sharding.layout)};
  const auto values = make_distributed(
      at::empty(local_sizes(settled, spec.sizes), impl.local().options()), settled, spec.sizes);
  fill.run(values, arguments, key);
  impl.local().copy_(redistribute_local(local_tensor(values), as_distributed(values)->spec(),
                                        spec.sharding.layout));
}

}  // namespace

bool fill_by_element(const OperatorInfo& info, Arguments arguments) {
  const auto* fill = std::find_if(kFills.begin(), kFills.end(),
                                  [&](const Fill& f) { return f.name == info.name; });
  if (fill == kFills.end() || !arguments.back().isNone()) return false;
  const auto& self = arguments.front().toTensor();
  const auto* impl = as_distributed(self);
  if (impl == nullptr || !self.is_floating_point()) return false;
  if (impl->detached_view()) check_writable(*impl, info.name);
  const auto key = next_random_key();
  BelowAutograd guard;
  if (impl->local().is_meta()) return true;
  if (impl->spec()->sharding.layout->is_partial()) {
    fill_partial(*impl, *fill, arguments, key);
  } else {
    fill->run(self, arguments, key);
  }
  if (impl->detached_view()) write_through(self);
  return true;
}

}  // namespace tessera::detail

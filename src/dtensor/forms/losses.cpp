// The mean of a loss whose samples are split: divided by the total weight, which no shard knows.

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>

#include <array>

#include "form.h"
#include "parts.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

/// Loss and total weight, in one all-reduce.
std::optional<double> bytes_of_mean(const BoundCall& bound) {
  const auto* self = settled_argument(bound, 0);
  if (self == nullptr || bound.call.integer(3) != at::Reduction::Mean) return std::nullopt;
  const auto& spec = *self->spec();
  Dims samples = all_dims(static_cast<std::int64_t>(spec.sizes.size()));
  const std::size_t classes = samples.size() > 1 ? 1 : 0;
  if (!splitting(spec.sharding.layout, {static_cast<std::int64_t>(classes)}).empty()) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples, 2);
}

/// (self, target, weight, reduction, ignore_index)
template <auto kForward>
Results run_mean(Arguments arguments) {
  const auto [sum, weight] =
      kForward(arguments[0].toTensor(), arguments[1].toTensor(),
               arguments[2].toOptional<at::Tensor>(), at::Reduction::Sum, arguments[4].toInt());
  const auto whole = settled_together({sum, weight});
  return {whole[0] / whole[1], whole[1].clone()};
}

constexpr std::array kLossesForms{
    Form{"nll_loss_forward", bytes_of_mean, run_mean<at::_ops::nll_loss_forward::call>},
    Form{"nll_loss2d_forward", bytes_of_mean, run_mean<at::_ops::nll_loss2d_forward::call>},
};

}  // namespace

std::span<const Form> loss_forms() {
  return kLossesForms;
}

}  // namespace tessera::detail

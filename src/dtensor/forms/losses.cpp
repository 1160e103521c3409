// The mean of a loss whose samples are sharded: a sum, divided by the total weight over all shards.

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>

#include "forms/form.h"
#include "forms/shard_slices.h"

namespace tessera::detail {
namespace {

/// Loss and total weight, in one all-reduce.
std::optional<double> bytes_of_mean(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  if (self == nullptr || bound.call.integer(3) != at::Reduction::Mean) {
    return std::nullopt;
  }
  const auto& spec = *self->spec();
  Dims samples = all_dims(static_cast<std::int64_t>(spec.sizes.size()));
  const std::size_t classes = samples.size() > 1 ? 1 : 0;
  // A sample picks one of its classes, so those have to be whole. (tensor_parallel has the loss of
  // sharded classes.)
  if (!sharding_mesh_dims(spec.sharding.layout, {static_cast<std::int64_t>(classes)}).empty()) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples, 2);
}

/// (self, target, weight, reduction, ignore_index)
template <auto kForward>
Results run_mean(Arguments arguments) {
  // As a sum the rule leaves both results partial. A mean of shards' means would be wrong: shards
  // have different weights, by their sizes, classes and ignored samples.
  const auto [sum, weight] =
      kForward(arguments[0].toTensor(), arguments[1].toTensor(),
               arguments[2].toOptional<at::Tensor>(), at::Reduction::Sum, arguments[4].toInt());
  const auto total = reduce_partials_together({sum, weight});
  // A clone, as unbind gives views and the operator gives none.
  return {total[0] / total[1], total[1].clone()};
}

const AddedForms kLossesForms{
    {"nll_loss_forward", bytes_of_mean, run_mean<at::_ops::nll_loss_forward::call>},
    {"nll_loss2d_forward", bytes_of_mean, run_mean<at::_ops::nll_loss2d_forward::call>},
};

}  // namespace

}  // namespace tessera::detail

// Cross-entropy from the operator's losses of rows (src/dtensor/fused/cross_entropy.cpp).

#include <ATen/core/Tensor.h>

#include "loss/targets.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {
namespace {

/// Refuses layouts that the operator would reduce or gather: logits are a model's largest tensors.
void check_layout(const at::Tensor& logits) {
  if (!tessera::is_distributed(logits)) {
    return;
  }
  const ShardingSpec& spec = sharding_spec(logits);
  TESSERA_CHECK(!spec.layout->is_partial(), "cross_entropy: the logits are laid out as ",
                to_string(*spec.layout), "; redistribute them to Shard(1)");
  tessera::detail::check_consecutive_columns(spec, 1);
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  check_options(options);
  tessera::detail::check_loss_sizes(logits.sizes(), targets.sizes());
  check_layout(logits);
  const at::Tensor own =
      own_targets(targets, logits.size(1), token_sharding(logits), options.ignore_index);
  compare_targets(own, logits, 1);
  const at::Tensor losses = tessera::detail::cross_entropy(logits, own, row_options(options));
  return options.reduction == Reduction::kNone ? losses_of_rows(losses)
                                               : reduced_loss(losses.sum(), targets, options);
}

at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index) {
  TESSERA_CHECK(targets.defined(), "tokens_per_rank was given an undefined tensor; pass targets");
  return mean_count(count_of(targets, ignore_index), mesh);
}

}  // namespace tessera::tensor_parallel

// Cross entropy of logits, Megatron-LM's vocab-parallel one. One autograd function, since its
// operators one by one would each keep a copy of the logits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "loss/row_losses.h"
#include "loss/targets.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The losses of this rank's rows, (tokens), of its columns.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& targets, const VocabularyShard& shard,
                            const CrossEntropyOptions& options) {
    const RowLosses rows = row_losses(logits, targets, shard, options);
    // The logits themselves and a few numbers a token; the softmax is computed again in backward.
    ctx->save_for_backward({logits, targets, rows.log_sum_exp});
    ctx->saved_data["vocabulary"] = shard.vocabulary;
    ctx->saved_data["first_column"] = shard.first_column;
    ctx->saved_data["ignore_index"] = options.ignore_index;
    ctx->saved_data["label_smoothing"] = options.label_smoothing;
    ctx->saved_data["z_loss"] = options.z_loss;
    return rows.losses;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    TESSERA_CHECK(
        !c10::GradMode::is_enabled(),
        "cross_entropy cannot be differentiated twice; call backward without create_graph");
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const VocabularyShard shard{data["vocabulary"].toInt(), data["first_column"].toInt(), nullptr};
    const CrossEntropyOptions options{.ignore_index = data["ignore_index"].toInt(),
                                      .label_smoothing = data["label_smoothing"].toDouble(),
                                      .z_loss = data["z_loss"].toDouble()};
    const at::Tensor gradient = at::empty_like(saved[0], at::MemoryFormat::Contiguous);
    write_logits_gradient(saved[0], saved[1], saved[2], gradients[0], shard, options, gradient);
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor to_local(const at::Tensor& logits) {
  if (!tessera::is_distributed(logits)) {
    return logits;
  }
  TESSERA_CHECK(!sharding_spec(logits).layout->is_partial(),
                "cross_entropy: the logits are laid out as ",
                to_string(*sharding_spec(logits).layout), "; redistribute them to Shard(1)");
  const tessera::detail::LocalPartsScope within_the_loss;
  return DistributedTensor(logits).to_local();
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  check_options(options);
  const TokenSharding rows = token_sharding(logits);
  const std::int64_t vocabulary = logits.dim() == 2 ? logits.size(1) : 0;
  const at::Tensor own_targets =
      local_targets(targets, logits.sizes(), vocabulary, rows, options.ignore_index);
  compare_targets(own_targets, logits, 1);
  const at::Tensor losses =
      CrossEntropy::apply(to_local(logits), own_targets, vocabulary_shard(logits, 1), options);
  if (options.reduction == Reduction::kNone) {
    return losses_of_rows(losses, rows, targets.size(0));
  }
  return reduced_loss(losses.sum(), targets, rows, options);
}

at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index) {
  return mean_count(count_of(targets, ignore_index), mesh);
}

}  // namespace tessera::tensor_parallel

// The losses of a language model. linear_cross_entropy computes the output head and the loss in
// chunks of tokens.
//
// Forward of linear_cross_entropy also computes the gradients of the sum of all losses, so the
// logits are computed only once. Backward multiplies these gradients by the gradient of the sum,
// such as 1 / tokens. The multiplication comes after rounding to fp16 or bf16, so that fewer fp16
// values underflow.

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/detail/records.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::tensor_parallel {
namespace {

/// How the tokens (rows of the logits) are sharded over a mesh; nullopt for plain logits.
using TokenSharding = std::optional<ShardingSpec>;

/// Throws Error if targets are ignored and several data-parallel ranks share the batch. FSDP gives
/// all ranks equal weights, although ranks can have different numbers of ignored targets.
void check_counts_alike(const at::Tensor& count, std::int64_t tokens) {
  const std::int64_t ranks = nn::batch_ranks();
  if (ranks == 1 || count.is_meta()) {
    return;
  }
  if (!count.is_cpu()) {
    at::_assert_async(count.eq(tokens),
                      "cross_entropy: some targets are ignored and ranks share the batch; pass "
                      "CrossEntropyOptions::over or tokens");
    return;
  }
  const std::int64_t ignored = tokens - count.item<std::int64_t>();
  TESSERA_CHECK(
      ignored == 0, "cross_entropy: ", ignored, " of ", tokens, " targets are ignored, and ", ranks,
      " data-parallel ranks share the batch: the mean of the ranks' means is not the mean over the "
      "tokens; pass .over = the mesh of fully_shard, for micro-batches .tokens = "
      "tokens_per_rank(targets, mesh), or .tokens = the number of tokens if this rank trains "
      "alone");
}

at::Tensor whole(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

at::Tensor count_of(const at::Tensor& targets, std::int64_t ignore_index) {
  return whole(targets.ne(ignore_index).sum());
}

at::Tensor mean_count(const at::Tensor& count, const DeviceMesh& mesh) {
  nn::note_weighing();
  const at::Tensor sum = count.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const DeviceMesh flat = mesh.ndim() == 1 ? mesh : mesh.flatten();
  if (flat.size() > 1) {
    flat.group().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  // The divisor is at least 1, so that the mean is 0 and not NaN if all targets are ignored.
  return sum.clamp_min(1).div_(flat.size());
}

tessera::detail::RowLossOptions row_options(const CrossEntropyOptions& options) {
  return {options.ignore_index, options.label_smoothing, options.z_loss};
}

void check_options(const CrossEntropyOptions& options) {
  tessera::detail::check_options(row_options(options));
  TESSERA_CHECK(!options.tokens.defined() || options.reduction == at::Reduction::Mean,
                "cross_entropy: .tokens needs at::Reduction::Mean; remove .tokens, or use Mean");
  TESSERA_CHECK(
      !options.over || (options.reduction == at::Reduction::Mean && !options.tokens.defined()),
      "cross_entropy: .over needs at::Reduction::Mean without .tokens; remove .over or .tokens, "
      "or use Mean");
  TESSERA_CHECK(!options.tokens.defined() || options.tokens.dim() == 0,
                "cross_entropy: .tokens must be a scalar tensor, but has sizes ",
                options.tokens.sizes());
}

TokenSharding token_sharding(const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return std::nullopt;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  return ShardingSpec{spec.mesh,
                      Layout::intern(spec.layout->mesh_sizes(), {spec.layout->digits(0)})};
}

bool are_split(const TokenSharding& rows) {
  return rows && !rows->layout->is_replicated();
}

/// Returns the targets of this rank's tokens (`rows`), distributed like the tokens, or plain.
/// Throws Error for targets on another mesh, and for invalid plain targets of sharded tokens.
/// Collective if the targets are redistributed.
at::Tensor own_targets(const at::Tensor& targets, std::int64_t vocabulary,
                       const TokenSharding& rows, std::int64_t ignore_index) {
  const bool distributed = tessera::is_distributed(targets);
  TESSERA_CHECK(!distributed || (rows && sharding_spec(targets).mesh == rows->mesh),
                "cross_entropy: the targets are distributed on another mesh than the logits; pass "
                "targets on the same mesh, or full_tensor() of the targets");
  if (!distributed && are_split(rows)) {
    tessera::detail::check_targets(targets, vocabulary, ignore_index);
  }
  return rows ? tessera::detail::targets_of_rows(targets, *rows) : targets;
}

/// With TESSERA_DEBUG=1, throws Error on all ranks if ranks that shard the vocabulary (dimension
/// `dim` of `sharded`) have different targets for the same rows. Collective with TESSERA_DEBUG=1.
void compare_targets(const at::Tensor& own_targets, const at::Tensor& sharded, int dim) {
  if (!tessera::detail::debug_checks() || !tessera::is_distributed(sharded)) {
    return;
  }
  const ShardingSpec& spec = sharding_spec(sharded);
  for (const int mesh_dim : spec.layout->mesh_dims_of(dim)) {
    tessera::detail::check_replicas(tessera::detail::peers_along(spec.mesh, mesh_dim),
                                    {{"the targets", local_tensor(own_targets)}},
                                    tessera::detail::Equality::kBitwise,
                                    "cross_entropy of logits sharded over the vocabulary",
                                    "give all ranks of this mesh dimension the same batch");
  }
}

/// Returns the losses for reduction None; a plain tensor if the tokens are not sharded.
at::Tensor losses_of_rows(const at::Tensor& losses) {
  return are_split(token_sharding(losses)) ? losses : whole(losses);
}

/// Returns the loss for reduction Sum or Mean, a plain scalar. `sum`: the sum of the losses of all
/// tokens, plain or Partial. Differentiable.
at::Tensor reduced_loss(const at::Tensor& sum, const at::Tensor& targets,
                        const CrossEntropyOptions& options) {
  at::Tensor all = whole(sum);
  if (options.reduction == at::Reduction::Sum) {
    return all;
  }
  if (options.tokens.defined()) {
    nn::note_weighing();
    return all.div(options.tokens.to(all.options()));
  }
  const at::Tensor count = count_of(targets, options.ignore_index);
  if (options.over) {
    return all.div(mean_count(count, options.over).to(all.options()));
  }
  if (all.requires_grad()) {
    check_counts_alike(count, targets.size(0));
  }
  return all.div(count.clamp_min(1));
}

/// Throws Error if the layout of the logits would require a reduction or a gather, because logits
/// are the largest tensors of a model.
void check_layout(const at::Tensor& logits) {
  if (!tessera::is_distributed(logits)) {
    return;
  }
  const ShardingSpec& spec = sharding_spec(logits);
  TESSERA_CHECK(!spec.layout->is_partial(), "cross_entropy: the layout of the logits is ",
                to_string(*spec.layout), "; redistribute the logits to Shard(1)");
  tessera::detail::check_consecutive_columns(spec, 1);
}

using tessera::detail::RowLosses;
using tessera::detail::VocabularyShard;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// One rank's plain inputs of linear_cross_entropy: the hidden states of the rank's tokens, and the
/// rank's shard of the weight.
struct HeadProblem {
  at::Tensor hidden, weight, targets;
  VocabularyShard shard;
  tessera::detail::RowLossOptions options;
  std::int64_t rows_of_chunk = 0;
};

struct HeadResults {
  at::Tensor losses;           ///< the loss of each of this rank's tokens
  at::Tensor hidden_gradient;  ///< gradient of the sum of the losses; undefined if not needed
  at::Tensor weight_gradient;  ///< gradient of the weight; undefined if not needed
};

/// Computes sum = left^T right, or sum += left^T right if `adds`. The sum of fp16 or bf16 factors
/// is fp32. Only CUDA can multiply such factors to an fp32 result. Other devices first convert the
/// factors to fp32, `left` in two halves to save memory.
void add_product(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right,
                 bool adds) {
  at::Tensor into = sum;
  const at::ScalarType type = sum.scalar_type();
  if (type == left.scalar_type()) {
    adds ? into.addmm_(left.t(), right) : at::mm_out(into, left.t(), right);
    return;
  }
  if (kernels::runs_on_cuda(left)) {
    adds ? at::addmm_out(into, into, left.t(), right, type)
         : at::mm_out(into, left.t(), right, type);
    return;
  }
  const at::Tensor factor = right.to(type);
  const std::int64_t step = detail::ceil_div(sum.size(0), std::int64_t{2});
  for (std::int64_t row = 0; row < sum.size(0); row += step) {
    const std::int64_t rows = std::min(step, sum.size(0) - row);
    add_product(sum.narrow(0, row, rows), left.narrow(1, row, rows).to(type), factor, adds);
  }
}

HeadResults allocate_results(const HeadProblem& problem, bool of_hidden, bool of_weight) {
  const at::Tensor& weight = problem.weight;
  const std::int64_t tokens = problem.hidden.size(0);
  const at::TensorOptions options = weight.options().dtype(kernels::loss_type(weight));
  HeadResults results{at::empty({tokens}, options), {}, {}};
  if (of_hidden) {
    results.hidden_gradient = at::empty_like(problem.hidden, at::MemoryFormat::Contiguous);
  }
  if (of_weight) {
    results.weight_gradient =
        tokens == 0 ? at::zeros(weight.sizes(), options) : at::empty(weight.sizes(), options);
  }
  return results;
}

/// Computes the losses of the tokens and the gradients chunk by chunk, without autograd. The
/// gradient of the logits is written into the memory of the logits.
HeadResults run_chunks(const HeadProblem& problem, bool of_hidden, bool of_weight) {
  const auto& [hidden, weight, targets, shard, options, step] = problem;
  HeadResults results = allocate_results(problem, of_hidden, of_weight);
  const std::int64_t tokens = hidden.size(0);
  const std::int64_t most = std::min(step, tokens);
  const at::Tensor memory = at::empty({most, weight.size(0)}, hidden.options());
  const at::Tensor sums = at::empty({most}, results.losses.options().dtype(at::kDouble));
  for (std::int64_t row = 0; row < tokens; row += step) {
    const std::int64_t rows = std::min(step, tokens - row);
    const at::Tensor inputs = hidden.narrow(0, row, rows);
    const at::Tensor wanted = targets.narrow(0, row, rows);
    at::Tensor logits = memory.narrow(0, 0, rows);
    at::mm_out(logits, inputs, weight.t());
    const RowLosses losses{results.losses.narrow(0, row, rows), sums.narrow(0, 0, rows)};
    tessera::detail::write_row_losses(logits, wanted, shard, options, losses);
    if (of_hidden || of_weight) {
      tessera::detail::write_logits_gradient(logits, wanted, losses.log_sum_exp, /*of_row=*/{},
                                             shard, options, logits);
    }
    if (of_hidden) {
      at::Tensor gradient = results.hidden_gradient.narrow(0, row, rows);
      at::mm_out(gradient, logits, weight);
    }
    if (of_weight) {
      add_product(results.weight_gradient, logits, inputs, /*adds=*/row > 0);
    }
  }
  return results;
}

at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, at::ScalarType type) {
  return tensor.defined() ? kernels::scaled(tensor, factor, type) : at::Tensor();
}

/// The autograd function that returns the sum of the losses of this rank's tokens.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const HeadProblem& problem) {
    const HeadResults results = run_chunks(problem, hidden.requires_grad(), weight.requires_grad());
    ctx->save_for_backward({results.hidden_gradient, results.weight_gradient});
    ctx->saved_data["type"] = weight.scalar_type();
    return results.losses.sum();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    TESSERA_CHECK(
        !c10::GradMode::is_enabled(),
        "linear_cross_entropy cannot be differentiated twice; call backward without create_graph");
    const variable_list saved = ctx->get_saved_variables();
    const at::ScalarType type = ctx->saved_data["type"].toScalarType();
    return {scaled(saved[0], gradients[0], type), scaled(saved[1], gradients[0], type),
            at::Tensor()};
  }
};

/// The placements on the mesh of the hidden states and of both gradients; empty for plain tensors.
struct HeadPlacements {
  Placements hidden, hidden_gradient, weight_gradient;
};

/// If the weight is sharded over a mesh dimension, the gradient of `hidden` is Partial there. If
/// the tokens are sharded, the gradient of `weight` is Partial there.
HeadPlacements head_placements(const DistributedTensor& hidden, const DistributedTensor& weight) {
  HeadPlacements result{hidden.placements(), hidden.placements(), weight.placements()};
  const Placements of_weight = weight.placements();
  for (std::size_t i = 0; i < of_weight.size(); ++i) {
    const bool columns = is_shard(of_weight[i], 0);
    const bool tokens = is_shard(result.hidden[i], 0);
    TESSERA_CHECK(
        (columns || is_replicate(of_weight[i])) && (tokens || is_replicate(result.hidden[i])),
        "linear_cross_entropy: on mesh dimension ", i, " of ", to_string(hidden.mesh()),
        " the hidden states are ", to_string(result.hidden[i]), " and the weight is ",
        to_string(of_weight[i]), "; each must be Shard(0) or Replicate()");
    if (columns) {
      result.hidden[i] = Replicate{};
      result.hidden_gradient[i] = Partial{};
    } else if (tokens) {
      result.weight_gradient[i] = Partial{};
    }
  }
  return result;
}

void check_head(const at::Tensor& hidden, const at::Tensor& weight,
                const LinearCrossEntropyOptions& options) {
  check_options(options.loss);
  TESSERA_CHECK(options.chunks >= 0 && options.chunk_bytes > 0, "linear_cross_entropy: .chunks is ",
                options.chunks, " and .chunk_bytes ", options.chunk_bytes,
                "; pass .chunks >= 1, or .chunks = 0 and .chunk_bytes >= 1");
  TESSERA_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                    hidden.scalar_type() == weight.scalar_type(),
                "linear_cross_entropy: hidden must be (tokens, features) and weight (vocabulary, "
                "features) of the same type, but hidden is ",
                hidden.sizes(), " ", hidden.scalar_type(), " and weight is ", weight.sizes(), " ",
                weight.scalar_type());
  const bool distributed = tessera::is_distributed(hidden);
  TESSERA_CHECK(distributed == tessera::is_distributed(weight) &&
                    (!distributed || sharding_spec(hidden).mesh == sharding_spec(weight).mesh),
                "linear_cross_entropy: the hidden tensor is ",
                distributed ? "on " + to_string(sharding_spec(hidden).mesh) : "plain",
                " and the weight ", distributed ? "is not on that mesh" : "is distributed",
                "; pass both plain, or both on one mesh");
}

/// Returns the losses of all tokens, sharded by tokens. `losses`: the losses of this rank's tokens.
/// If this rank has all tokens, returns `losses` itself.
at::Tensor distributed_losses(const at::Tensor& losses, const TokenSharding& rows,
                              std::int64_t tokens) {
  return are_split(rows) ? DistributedTensor::from_local(losses, *rows, {tokens}).tensor() : losses;
}

/// Returns the sum of the losses of all tokens, as a Partial tensor. `sum`: the sum for this rank's
/// tokens. If this rank has all tokens, returns `sum` itself.
at::Tensor partial_sum(const at::Tensor& sum, const TokenSharding& rows) {
  if (!are_split(rows)) {
    return sum;
  }
  Placements terms(static_cast<std::size_t>(rows->mesh.ndim()), Replicate{});
  for (const int mesh_dim : rows->layout->mesh_dims_of(0)) {
    terms[static_cast<std::size_t>(mesh_dim)] = Partial{};
  }
  return DistributedTensor::from_local(sum, rows->mesh, terms).tensor();
}

/// Returns the number of tokens of a chunk. The number depends only on global sizes: ranks with the
/// same tokens must use equal chunks.
std::int64_t rows_of_chunk(const at::Tensor& hidden, const VocabularyShard& shard,
                           const LinearCrossEntropyOptions& options) {
  const std::int64_t tokens = hidden.size(0);
  if (options.chunks > 0) {
    return std::max<std::int64_t>(1, detail::ceil_div(tokens, options.chunks));
  }
  const std::int64_t ranks = shard.group == nullptr ? 1 : shard.group->size();
  const std::int64_t columns = std::max<std::int64_t>(1, detail::ceil_div(shard.vocabulary, ranks));
  const auto bytes = columns * static_cast<std::int64_t>(hidden.element_size());
  const std::int64_t most = std::max<std::int64_t>(1, options.chunk_bytes / bytes);
  // Rounds down to a multiple of the tile size of GPU matrix products.
  for (const std::int64_t tiles : {1024, 128}) {
    if (most >= tiles) {
      return most / tiles * tiles;
    }
  }
  return most;
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
  return options.reduction == at::Reduction::None ? losses_of_rows(losses)
                                                  : reduced_loss(losses.sum(), targets, options);
}

at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index) {
  TESSERA_CHECK(targets.defined(), "tokens_per_rank: the targets are undefined; pass a tensor");
  return mean_count(count_of(targets, ignore_index), mesh);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  check_head(hidden, weight, options);
  tessera::detail::check_loss_sizes(hidden.sizes(), targets.sizes());
  const comm::CallerScope caller("linear_cross_entropy");
  HeadProblem problem{hidden,
                      weight,
                      {},
                      tessera::detail::vocabulary_shard(weight, 0),
                      row_options(options.loss),
                      /*rows_of_chunk=*/0};
  TokenSharding rows;
  if (tessera::is_distributed(hidden)) {
    const DistributedTensor states(hidden), head(weight);
    const HeadPlacements placements = head_placements(states, head);
    const DistributedTensor own =
        states.placements() == placements.hidden ? states : states.redistribute(placements.hidden);
    rows = token_sharding(own);
    const tessera::detail::LocalPartsScope within_the_loss;
    problem.hidden = own.to_local(placements.hidden_gradient);
    problem.weight = head.to_local(placements.weight_gradient);
  }
  problem.targets =
      local_tensor(own_targets(targets, problem.shard.vocabulary, rows, options.loss.ignore_index));
  tessera::detail::check_targets(problem.targets, problem.shard.vocabulary,
                                 options.loss.ignore_index);
  compare_targets(problem.targets, weight, 0);
  problem.rows_of_chunk = rows_of_chunk(problem.hidden, problem.shard, options);
  const bool gradient = c10::GradMode::is_enabled() &&
                        (problem.hidden.requires_grad() || problem.weight.requires_grad());
  if (options.loss.reduction == at::Reduction::None) {
    TESSERA_CHECK(
        !gradient,
        "linear_cross_entropy: at::Reduction::None cannot be differentiated, because forward does "
        "not know the gradient of each row's loss; use Sum, Mean or cross_entropy()");
    return distributed_losses(run_chunks(problem, false, false).losses, rows, targets.size(0));
  }
  const at::Tensor sum = gradient
                             ? LinearCrossEntropy::apply(problem.hidden, problem.weight, problem)
                             : run_chunks(problem, false, false).losses.sum();
  return reduced_loss(partial_sum(sum, rows), targets, options.loss);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  return head(hidden, nn::detail::LinearProduct([&](const at::Tensor& x, const at::Tensor& weight,
                                                    const at::Tensor& bias) {
                TESSERA_CHECK(!bias.defined(),
                              "linear_cross_entropy: the head has a bias, which is not supported; "
                              "make the head with {.bias = false}");
                return linear_cross_entropy(x, weight, targets, options);
              }));
}

}  // namespace tessera::tensor_parallel

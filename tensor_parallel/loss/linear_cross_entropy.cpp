// The head and the loss of a language model, in chunks of the tokens. Forward computes the
// gradients as if each row's loss were multiplied by 1; backward multiplies them by the actual
// factor, one number. So nothing is computed twice, and values rounded to a half type are
// probabilities in size, whatever the scale of the loss.

#include "tessera/tensor_parallel/linear_cross_entropy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "loss/targets.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/row_losses.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/detail/cross_entropy.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::RowLosses;
using tessera::detail::VocabularyShard;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// One rank's problem: plain tensors, its rows and columns.
struct HeadProblem {
  at::Tensor hidden, weight, targets;
  VocabularyShard shard;
  tessera::detail::RowLossOptions options;
  std::int64_t rows_of_chunk = 0;
};

struct HeadResults {
  at::Tensor losses;           ///< (tokens)
  at::Tensor hidden_gradient;  ///< of the sum of the losses; undefined if not asked for
  at::Tensor weight_gradient;  ///< likewise; of sum_type()
};

/// The type in which the weight's gradient is summed over the parts. In bf16 the product adds to
/// it: it is rounded once for each part, and few parts lose no more than that. After many, a part's
/// term would be less than half of the sum's last bit. The range of fp16 is that of a mean, not of
/// a sum.
at::ScalarType sum_type(const HeadProblem& problem) {
  constexpr std::int64_t kFewParts = 16;
  const std::int64_t parts =
      (problem.hidden.size(0) + problem.rows_of_chunk - 1) / problem.rows_of_chunk;
  return problem.weight.scalar_type() == at::kBFloat16 && parts <= kFewParts
             ? at::kBFloat16
             : kernels::loss_type(problem.weight);
}

/// sum = left^T right, or with `adds` sum += left^T right. A product in a half type is rounded
/// before it is added to fp32. So it is made of some of its rows at a time, and takes no more
/// memory than `left`.
void add_product(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right,
                 bool adds) {
  at::Tensor into = sum;
  if (sum.scalar_type() == left.scalar_type()) {
    adds ? into.addmm_(left.t(), right) : at::mm_out(into, left.t(), right);
    return;
  }
  const std::int64_t step =
      std::max<std::int64_t>(1, left.numel() / std::max<std::int64_t>(1, right.size(1)));
  for (std::int64_t row = 0; row < sum.size(0); row += step) {
    const std::int64_t rows = std::min(step, sum.size(0) - row);
    const at::Tensor product = at::mm(left.narrow(1, row, rows).t(), right);
    into = sum.narrow(0, row, rows);
    adds ? into.add_(product) : into.copy_(product);
  }
}

HeadResults allocate_results(const HeadProblem& problem, bool of_hidden, bool of_weight) {
  const at::Tensor& weight = problem.weight;
  const std::int64_t tokens = problem.hidden.size(0);
  HeadResults results{
      at::empty({tokens}, weight.options().dtype(kernels::loss_type(weight))), {}, {}};
  if (of_hidden) {
    results.hidden_gradient = at::empty_like(problem.hidden, at::MemoryFormat::Contiguous);
  }
  if (of_weight) {
    const auto options = weight.options().dtype(sum_type(problem));
    results.weight_gradient =
        tokens == 0 ? at::zeros(weight.sizes(), options) : at::empty(weight.sizes(), options);
  }
  return results;
}

/// Below autograd. In all three products of the whole: of the logits, and from their gradient,
/// which takes their place, those of both gradients.
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

/// `tensor` times the number `factor`, in another type.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor, at::ScalarType type) {
  return tensor.defined() ? kernels::scaled(tensor, factor, type) : at::Tensor();
}

/// The sum of the losses of this rank's rows.
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

/// The placements of hidden states and weight on a mesh; of plain ones, none.
struct HeadPlacements {
  Placements hidden, hidden_gradient, weight_gradient;
};

/// On each mesh dimension at most one of the two is split. Over a split of the weight, the gradient
/// of the hidden states is a sum of each rank's term; over a split of the tokens, that of the
/// weight.
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
  TESSERA_CHECK(options.chunks >= 0 && options.chunk_bytes > 0, "linear_cross_entropy: chunks are ",
                options.chunks, " and chunk_bytes ", options.chunk_bytes,
                "; pass chunks from 1 on, or 0 and a number of bytes");
  TESSERA_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                    hidden.scalar_type() == weight.scalar_type(),
                "linear_cross_entropy: hidden must be (tokens, features) and weight (vocabulary, "
                "features) of one type, but they are ",
                hidden.sizes(), " ", hidden.scalar_type(), " and ", weight.sizes(), " ",
                weight.scalar_type());
  const bool distributed = tessera::is_distributed(hidden);
  TESSERA_CHECK(distributed == tessera::is_distributed(weight) &&
                    (!distributed || sharding_spec(hidden).mesh == sharding_spec(weight).mesh),
                "linear_cross_entropy: hidden is ",
                distributed ? to_string(sharding_spec(hidden).mesh) : "plain", " and weight ",
                distributed ? "is not on it" : "is distributed",
                "; pass both plain, or both on one mesh");
}

/// The losses of this rank's rows as a shard of all losses; plain if it has all rows.
at::Tensor distributed_losses(const at::Tensor& losses, const TokenSharding& rows,
                              std::int64_t tokens) {
  return are_split(rows) ? DistributedTensor::from_local(losses, *rows, {tokens}).tensor() : losses;
}

/// The sum of this rank's losses as a term of the sum of all.
at::Tensor pending_sum(const at::Tensor& sum, const TokenSharding& rows) {
  if (!are_split(rows)) {
    return sum;
  }
  Placements terms(static_cast<std::size_t>(rows->mesh.ndim()), Replicate{});
  for (const int mesh_dim : rows->layout->mesh_dims_of(0)) {
    terms[static_cast<std::size_t>(mesh_dim)] = Partial{};
  }
  return DistributedTensor::from_local(sum, rows->mesh, terms).tensor();
}

/// By sizes alone: the same on every rank that shares the tokens, also with uneven columns.
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
  // A GPU makes products of tiles, which these fill.
  for (const std::int64_t tiles : {1024, 128}) {
    if (most >= tiles) {
      return most / tiles * tiles;
    }
  }
  return most;
}

}  // namespace

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
  if (options.loss.reduction == Reduction::kNone) {
    TESSERA_CHECK(!gradient,
                  "linear_cross_entropy: kNone has no gradient here, since what each row's loss is "
                  "multiplied by is not known in forward; use kSum or kMean, or cross_entropy");
    return distributed_losses(run_chunks(problem, false, false).losses, rows, targets.size(0));
  }
  const at::Tensor sum = gradient
                             ? LinearCrossEntropy::apply(problem.hidden, problem.weight, problem)
                             : run_chunks(problem, false, false).losses.sum();
  return reduced_loss(pending_sum(sum, rows), targets, options.loss);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  return head(hidden, nn::LinearProduct([&](const at::Tensor& x, const at::Tensor& weight,
                                            const at::Tensor& bias) {
                TESSERA_CHECK(!bias.defined(),
                              "linear_cross_entropy: the head has a bias, which nothing would add; "
                              "make it with {.bias = false}");
                return linear_cross_entropy(x, weight, targets, options);
              }));
}

}  // namespace tessera::tensor_parallel

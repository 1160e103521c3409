// The held-out loss, between the steps of a training and at its end.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "examples/llama/same_start.h"
#include "examples/llama/train/llama_run.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/training/evaluation.h"

namespace llama {

using namespace tessera;

namespace {

/// Enough text for a steady figure, little enough to end a short run soon.
constexpr std::int64_t kMaxEvalBatches = 32;

std::int64_t held_out_batches(const LlamaRun& run) {
  return std::min(run.data.eval_loader->samples() / run.options.batch, kMaxEvalBatches);
}

/// The first parameter of any rank with a value that is not finite; "" if there is none.
/// Collective.
std::string nonfinite_parameter(LlamaRun& run) {
  std::string own;
  for (const auto& [name, slot] : run.model->named_slots()) {
    if (own.empty() && !local_tensor(slot->persistent()).isfinite().all().item<bool>()) {
      own = name;
    }
  }
  const std::vector<std::string> all = comm::gather_texts(*start_group(*run.world), c10::kCPU, own);
  const auto found = std::ranges::find_if_not(all, &std::string::empty);
  return found == all.end() ? "" : *found;
}

/// The text of the tokens that are evaluated, without the first, which is not predicted.
std::string evaluated_text(const LlamaRun& run, std::int64_t tokens) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens) + 1);
  run.data.eval_text->read(0, ids);
  const std::size_t first = run.data.tokenizer->decode({ids.front()}).size();
  return run.data.tokenizer->decode(ids).substr(first);
}

}  // namespace

std::optional<double> held_out_loss(LlamaRun& run, const std::function<bool()>& stop) {
  double counted = 0;  // tokens a rank, where not all count
  const auto loss_of_batch = [&](std::int64_t i) {
    const data::BatchLoader& loader = *run.data.eval_loader;
    const data::BatchLoader::Batch batch = run.own_rows(loader.load(i, run.rows, run.uses_cuda()));
    tensor_parallel::CrossEntropyOptions options;
    if (loader.ignores_targets()) {
      options.tokens = tensor_parallel::tokens_per_rank(batch.targets, run.data_ranks);
    }
    at::Tensor sum = run.loss_of(batch, 0, options);
    for (std::int64_t k = 1; k < run.options.accumulate; ++k) {
      sum = sum + run.loss_of(batch, k, options);
    }
    if (!options.tokens.defined()) {
      return sum / run.options.accumulate;
    }
    counted += options.tokens.item<double>();
    return sum * options.tokens;
  };
  const std::int64_t batches = held_out_batches(run);
  const std::optional<double> mean =
      training::evaluate(*run.model, run.data_ranks, batches, loss_of_batch, stop);
  if (mean && !std::isfinite(*mean)) {
    const std::string name = nonfinite_parameter(run);
    fail("the held-out loss after step ", run.state.step, " is ", *mean, "; ",
         name.empty() ? "all parameters are finite" : "the parameter " + name + " is not finite",
         "; take the weights of an earlier step");
  }
  return mean && counted > 0 ? *mean * static_cast<double>(batches) / counted : mean;
}

void print_held_out_loss(const LlamaRun& run, double loss) {
  const TrainOptions& options = run.options;
  const std::int64_t tokens = held_out_batches(run) * options.batch * options.seq;
  if (!run.data.eval_text) {
    std::cout << fmt::format("held-out loss: {:.4f} a token ({} tokens of {})", loss, tokens,
                             fmt::join(options.eval_tokens, ", "))
              << std::endl;
    return;
  }
  // Per byte of the same tokens, so that models with other tokenizers compare.
  const std::string text = evaluated_text(run, tokens);
  const double bytes = std::max<double>(static_cast<double>(text.size()), 1);
  std::cout << fmt::format(
                   "held-out loss: {:.4f} nats/byte ({:.4f} a token, {} tokens of {}); "
                   "byte-bigram entropy of that text: {:.4f} nats/byte",
                   loss * static_cast<double>(tokens) / bytes, loss, tokens,
                   fmt::join(options.eval_text, ", "), data::bigram_entropy(text))
            << std::endl;
}

}  // namespace llama

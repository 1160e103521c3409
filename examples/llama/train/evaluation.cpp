// The held-out loss, between the steps of a training and at its end.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>

#include "examples/llama/train/llama_run.h"
#include "tessera/training/evaluation.h"

namespace llama {

using namespace tessera;

namespace {

/// Enough text for a steady figure, little enough to end a short run soon.
constexpr std::int64_t kMaxEvalBatches = 32;

std::int64_t held_out_batches(const LlamaRun& run) {
  return std::min(run.data.eval_loader->samples() / run.options.batch, kMaxEvalBatches);
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
  return mean && counted > 0 ? *mean * static_cast<double>(batches) / counted : mean;
}

void print_held_out_loss(const LlamaRun& run, double loss) {
  const TrainOptions& options = run.options;
  const std::int64_t tokens = held_out_batches(run) * options.batch * options.seq;
  if (run.data.eval_text.empty()) {
    std::cout << fmt::format("held-out loss: {:.4f} a token ({} tokens of {})", loss, tokens,
                             fmt::join(options.eval_tokens, ", "))
              << std::endl;
    return;
  }
  // Per byte, so that the two figures compare whatever the tokenizer.
  const double tokens_per_byte =
      static_cast<double>(run.data.tokenizer->encode(run.data.eval_text).size()) /
      static_cast<double>(run.data.eval_text.size());
  std::cout << fmt::format(
                   "held-out loss: {:.4f} nats/byte ({:.4f} a token, {} tokens of {}); "
                   "byte-bigram entropy of that text: {:.4f} nats/byte",
                   loss * tokens_per_byte, loss, tokens, fmt::join(options.eval_text, ", "),
                   data::bigram_entropy(run.data.eval_text))
            << std::endl;
}

}  // namespace llama

// The held-out loss, between the steps of a training and at its end.

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <optional>

#include "examples/llama/train/setup.h"
#include "examples/llama/train/trainer.h"

namespace llama {

using namespace tessera;

namespace {

/// Enough text for a steady figure, little enough to end a short run soon.
constexpr std::int64_t kMaxEvalBatches = 32;

std::int64_t batches_of_evaluation(const TrainingData& data, std::int64_t batch) {
  return std::min(data.eval_loader->samples() / batch, kMaxEvalBatches);
}

}  // namespace

std::optional<double> Trainer::evaluate() {
  const c10::NoGradGuard no_grad;
  model_->eval();
  const std::int64_t batches = batches_of_evaluation(data_, options_.batch);
  double sum = 0;
  for (std::int64_t i = 0; i < batches; ++i) {
    const data::BatchLoader::Batch batch = tokens_of_rank(
        *model_, data_.eval_loader->load(i, first_row_, first_row_ + rows_, uses_cuda())
                     .to(c10::Device(options_.device)));
    at::Tensor loss = loss_of(batch, 0);
    for (std::int64_t k = 1; k < options_.accumulate; ++k) {
      loss = loss + loss_of(batch, k);
    }
    sum += mean_over_data(loss / options_.accumulate).item<double>();
    if (told_to_stop()) {
      return std::nullopt;  // the last step is saved, or being saved
    }
  }
  model_->train();
  return sum / static_cast<double>(batches);
}

bool Trainer::evaluate_if_due(observe::StepMetrics& metrics) {
  const bool due = options_.eval_every > 0 &&
                   (position_.step % options_.eval_every == 0 || position_.step == options_.steps);
  eval_loss_.reset();
  if (!due) {
    return true;
  }
  swap_averages();
  eval_loss_ = evaluate();
  swap_averages();
  // Memory is counted for each step.
  observe::take_memory_use(options_.device);
  metrics.eval_loss = eval_loss_;
  return eval_loss_.has_value();
}

bool Trainer::evaluate_at_end() {
  if (data_.eval_loader == nullptr) {
    return true;
  }
  if (!eval_loss_) {
    eval_loss_ = evaluate();
  }
  if (eval_loss_ && is_main()) {
    print_evaluation();
  }
  return eval_loss_.has_value();
}

void Trainer::print_evaluation() const {
  const std::int64_t tokens =
      batches_of_evaluation(data_, options_.batch) * options_.batch * options_.seq;
  if (data_.eval_text.empty()) {
    std::cout << fmt::format("held-out loss: {:.4f} a token ({} tokens of {})", *eval_loss_, tokens,
                             fmt::join(options_.eval_tokens, ", "))
              << std::endl;
    return;
  }
  // Per byte, so that the two figures compare whatever the tokenizer.
  const double tokens_per_byte =
      static_cast<double>(data_.tokenizer->encode(data_.eval_text).size()) /
      static_cast<double>(data_.eval_text.size());
  std::cout << fmt::format(
                   "held-out loss: {:.4f} nats/byte ({:.4f} a token, {} tokens of {}); "
                   "byte-bigram entropy of that text: {:.4f} nats/byte",
                   *eval_loss_ * tokens_per_byte, *eval_loss_, tokens,
                   fmt::join(options_.eval_text, ", "), data::bigram_entropy(data_.eval_text))
            << std::endl;
}

}  // namespace llama

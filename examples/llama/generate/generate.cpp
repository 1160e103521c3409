#include "examples/llama/generate/generate.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tessera/core/error.h"

namespace llama {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Prompts as one batch: padded on the left, so that all end together.
struct Batch {
  explicit Batch(const std::vector<Tokens>& prompts);

  std::int64_t longest = 0, tokens_in_all = 0;
  std::vector<std::int64_t> padding;
  at::Tensor tokens;  ///< (texts, longest)
};

Batch::Batch(const std::vector<Tokens>& prompts) {
  TESSERA_CHECK(!prompts.empty(), "no prompt is given; pass at least one");
  for (const Tokens& prompt : prompts) {
    TESSERA_CHECK(!prompt.empty(), "the prompt is empty; pass at least one character");
    longest = std::max(longest, std::ssize(prompt));
    tokens_in_all += std::ssize(prompt);
  }
  tokens = at::zeros({std::ssize(prompts), longest}, c10::kLong);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    padding.push_back(longest - std::ssize(prompts[i]));
    tokens[static_cast<std::int64_t>(i)]
        .slice(0, padding[i])
        .copy_(at::tensor(prompts[i], c10::kLong));
  }
}

/// What rank 0 decides after each forward: the next tokens, and which texts go on.
class Chooser {
 public:
  Chooser(const SamplingOptions& options, const std::vector<Tokens>& prompts, const Tokens& end,
          const TokenSink& sink)
      : sampler_(options, prompts), end_(end), sink_(sink), goes_on_(prompts.size(), true) {}

  /// A text that has ended keeps its row of the batch; its tokens are dropped.
  Tokens next(const at::Tensor& logits) {
    Tokens tokens = sampler_.next(logits);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (goes_on_[i]) {
        goes_on_[i] = std::ranges::find(end_, tokens[i]) == end_.end();
        if (goes_on_[i]) {
          ++given_;
          goes_on_[i] = sink_(i, tokens[i]);
        }
      }
    }
    return tokens;
  }
  bool any_goes_on() const { return std::ranges::find(goes_on_, true) != goes_on_.end(); }
  std::int64_t given() const { return given_; }

 private:
  Sampler sampler_;
  const Tokens& end_;
  const TokenSink& sink_;
  std::vector<bool> goes_on_;
  std::int64_t given_ = 0;
};

/// What rank 0 has, on all ranks. Not computed on each: the arithmetic of a draw may differ between
/// hosts of other processors, and ranks with different texts would not notice.
Tokens of_rank_0(Tokens own, tessera::comm::Communicator* ranks, c10::Device device) {
  if (ranks == nullptr || ranks->size() == 1) {
    return own;
  }
  const at::Tensor shared = at::tensor(own, c10::kLong).to(device);
  ranks->broadcast(shared, 0)->wait();
  const at::Tensor on_host = shared.to(c10::kCPU);
  std::copy_n(on_host.const_data_ptr<std::int64_t>(), own.size(), own.begin());
  return own;
}

}  // namespace

GenerationTimes generate(Llama& model, const std::vector<Tokens>& prompts,
                         const SamplingOptions& options, const Tokens& end, const TokenSink& sink,
                         tessera::comm::Communicator* ranks) {
  // The cache would otherwise keep the graph of every token.
  const c10::NoGradGuard no_grad;
  const Batch batch(prompts);
  const c10::Device device = model.device();
  const bool chooses = ranks == nullptr || ranks->rank() == 0;
  Chooser chooser(options, prompts, end, sink);
  KvCache cache = model.new_cache(batch.longest + options.max_tokens, batch.padding);
  GenerationTimes times{.prompt_tokens = batch.tokens_in_all};
  at::Tensor input = batch.tokens.to(device);
  const Clock::time_point start = Clock::now();
  std::int64_t first_tokens = 0;
  for (std::int64_t n = 0; n < options.max_tokens; ++n) {
    const at::Tensor logits = model(input, &cache);
    Tokens next = chooses ? chooser.next(logits) : Tokens(prompts.size());
    next.push_back(chooser.any_goes_on() ? 1 : 0);
    next = of_rank_0(std::move(next), ranks, device);
    if (n == 0) {
      times.prompt_s = seconds_since(start);
      first_tokens = chooser.given();
    }
    if (next.back() == 0) {
      break;
    }
    next.pop_back();
    // From here on one token a call; the cache has the rest.
    input = at::tensor(next, c10::kLong).unsqueeze(1).to(device);
  }
  times.decoding_s = seconds_since(start) - times.prompt_s;
  times.tokens = chooser.given() - first_tokens;
  return times;
}

}  // namespace llama

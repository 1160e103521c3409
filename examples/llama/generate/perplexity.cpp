#include "examples/llama/generate/perplexity.h"

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "tessera/core/error.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace llama {

TextWindows perplexity_windows(const GenerateOptions& options, const Config& config) {
  constexpr std::int64_t kDefault = 2048;
  const std::int64_t most = config.max_positions;
  TESSERA_CHECK(most == 0 || options.seq <= most, "--seq ", options.seq, " is more than the ", most,
                " positions that the model is made for; take fewer");
  const std::int64_t by_default = most == 0 ? kDefault : std::min(most, kDefault);
  const std::int64_t size = options.seq > 0 ? options.seq : by_default;
  const std::int64_t stride = options.stride > 0 ? options.stride : size;
  TESSERA_CHECK(stride <= size, "--stride ", stride, " is more than --seq, which is ", size,
                ": tokens between two windows would be left out");
  return {size, stride};
}

TextLoss text_loss(Llama& model, const Tokens& text, std::int64_t window, std::int64_t stride) {
  const tessera::tensor_parallel::CrossEntropyOptions options{
      .reduction = tessera::tensor_parallel::Reduction::kSum};
  const c10::NoGradGuard no_grad;
  TESSERA_CHECK(text.size() >= 2,
                "a text for perplexity must have two tokens or more, as the first "
                "is not predicted, but this one has ",
                text.size(), "; give a longer one");
  const at::Tensor tokens = at::tensor(text, c10::kLong);
  const std::int64_t last = std::ssize(text) - 1;
  double sum = 0;
  // Tokens [0, predicted) have been counted, or are the first.
  std::int64_t predicted = 1;
  for (std::int64_t begin = 0; predicted <= last; begin += stride) {
    const std::int64_t end = std::min(begin + window, last);
    const at::Tensor inputs = tokens.slice(0, begin, end).unsqueeze(0).to(model.device());
    const at::Tensor targets = tokens.slice(0, begin + 1, end + 1).clone();
    targets.slice(0, 0, predicted - begin - 1).fill_(options.ignore_index);
    // By parts of its tokens: the logits of a window may take gigabytes.
    const HeadLoss head{targets.to(model.device()), {.loss = options}, {}};
    sum += model(inputs, head).item<double>();
    predicted = end + 1;
  }
  return {last, sum / static_cast<double>(last)};
}

void print_perplexity(const TextLoss& loss, bool json) {
  const double perplexity = std::exp(loss.mean);
  std::cout << (json ? fmt::format(R"({{"tokens": {}, "perplexity": {:.8g}}})", loss.tokens,
                                   perplexity)
                     : fmt::format("tokens: {}  perplexity: {:.6f}", loss.tokens, perplexity))
            << std::endl;
}

}  // namespace llama

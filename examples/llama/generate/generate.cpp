// Generates texts with a model.

#include "examples/llama/generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <iostream>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

#include "examples/llama/start.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/dtensor/random.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace llama {

// ---- Sampling.

namespace {

constexpr double kRefused = -std::numeric_limits<double>::infinity();

at::Tensor penalized(const at::Tensor& scores, const at::Tensor& seen, double penalty) {
  if (!seen.defined()) {
    return scores;
  }
  return at::where(seen, at::where(scores.lt(0), scores * penalty, scores / penalty), scores);
}

/// Keeps the scores of the k most likely tokens, and of tokens that are as likely as the k-th.
at::Tensor keep_top_k(const at::Tensor& scores, std::int64_t k) {
  if (k == 0 || k >= scores.size(-1)) {
    return scores;
  }
  const at::Tensor least = std::get<0>(scores.topk(k)).slice(-1, k - 1);
  return scores.masked_fill(scores.lt(least), kRefused);
}

at::Tensor keep_top_p(const at::Tensor& scores, double p) {
  if (p >= 1) {
    return scores;
  }
  const auto [sorted, ids] = scores.softmax(-1).sort(-1, /*descending=*/true);
  // A token is rejected if the more likely tokens already have probability p in total. The most
  // likely token is never rejected.
  const at::Tensor before = sorted.cumsum(-1) - sorted;
  const at::Tensor refused = before.ge(p);
  return scores.masked_fill(refused.scatter(-1, ids, refused), kRefused);
}

at::Tensor keep_min_p(const at::Tensor& scores, double p) {
  if (p == 0) {
    return scores;
  }
  const at::Tensor probabilities = scores.softmax(-1);
  return scores.masked_fill(probabilities.lt(probabilities.amax(-1, /*keepdim=*/true) * p),
                            kRefused);
}

}  // namespace

at::Tensor token_probabilities(const at::Tensor& logits, const at::Tensor& seen,
                               const SamplingOptions& options) {
  // The scores are fp64, so that the cumulative sum over a large vocabulary is accurate.
  const at::Tensor scores =
      penalized(logits.to(c10::kDouble), seen, options.repetition_penalty) / options.temperature;
  return keep_min_p(keep_top_p(keep_top_k(scores, options.top_k), options.top_p), options.min_p)
      .softmax(-1);
}

Sampler::Sampler(SamplingOptions options, std::vector<Tokens> prompts)
    : options_(options), prompts_(std::move(prompts)) {
  TESSERA_CHECK(options.top_p > 0 && options.top_p <= 1, "top_p is ", options.top_p,
                "; it must be above 0 and at most 1");
}

Tokens Sampler::next(const at::Tensor& logits) {
  TESSERA_CHECK(
      !logits.isnan().any().item<bool>(),
      "the logits of the next token are not numbers; the weights are not either, or their "
      "products are beyond fp16: take --dtype bf16 or fp32");
  if (options_.repetition_penalty != 1 && !seen_.defined()) {
    seen_ = at::zeros_like(logits, at::dtype(c10::kBool));
    for (std::size_t i = 0; i < prompts_.size(); ++i) {
      seen_[static_cast<std::int64_t>(i)].index_fill_(
          0, at::tensor(prompts_[i], at::dtype(c10::kLong)).to(logits.device()), true);
    }
  }
  // Temperature 0 selects the most likely token.
  const at::Tensor tokens =
      options_.temperature == 0
          ? penalized(logits.to(c10::kDouble), seen_, options_.repetition_penalty).argmax(-1)
          : draw(token_probabilities(logits, seen_, options_));
  ++calls_;
  remember(tokens);
  const at::Tensor on_host = tokens.to(c10::kCPU).contiguous();
  const auto* first = on_host.const_data_ptr<std::int64_t>();
  return {first, first + on_host.numel()};
}

/// Inverse transform sampling: the first token whose cumulative probability exceeds a uniform
/// random number.
at::Tensor Sampler::draw(const at::Tensor& probabilities) const {
  const at::Tensor uniform = at::empty({probabilities.size(0)}, c10::kDouble);
  tessera::uniform_(uniform, 0.0, 1.0, {options_.seed, calls_});
  const at::Tensor cumulative = probabilities.cumsum(-1);
  const at::Tensor sum = cumulative.slice(-1, -1);
  // The random number is scaled by the total of the cumulative sum, which rounding may make
  // different from 1. The target must be below the total, because the last token may be a rejected
  // token.
  const at::Tensor target = at::minimum(uniform.to(probabilities.device()).unsqueeze(1) * sum,
                                        at::nextafter(sum, at::zeros({}, sum.options())));
  return cumulative.le(target).sum(-1);
}

void Sampler::remember(const at::Tensor& tokens) {
  if (seen_.defined()) {
    seen_.scatter_(1, tokens.unsqueeze(1), true);
  }
}

// ---- Stop strings.

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) {
    return "";
  }
  pending_ += piece;
  std::size_t shown = pending_.size() - held_back();
  for (const std::string& stop : stops_) {
    const std::size_t found = pending_.find(stop);
    if (found != std::string::npos) {
      shown = stopped_ ? std::min(shown, found) : found;
      stopped_ = true;
    }
  }
  std::string text = pending_.substr(0, shown);
  pending_.erase(0, shown);
  return text;
}

std::string StopStrings::finish() {
  return stopped_ ? "" : std::exchange(pending_, "");
}

/// The number of bytes at the end of the withheld text that may be the beginning of a stop string.
std::size_t StopStrings::held_back() const {
  std::size_t most = 0;
  for (const std::string& stop : stops_) {
    std::size_t length = std::min(stop.size() - 1, pending_.size());
    while (length > most && !pending_.ends_with(std::string_view(stop).substr(0, length))) {
      --length;
    }
    most = std::max(most, length);
  }
  return most;
}

// ---- The texts of a batch.

GrowingText::GrowingText(std::string prompt, const Tokens& tokens,
                         const tessera::data::TokenizerPtr& tokenizer,
                         const std::vector<std::string>& stops)
    : prompt_(std::move(prompt)), decoder_(tokenizer, tokens), stops_(stops) {}

std::string GrowingText::push(std::int64_t token) {
  tokens_.push_back(token);
  return show(stops_.push(decoder_.push(token)));
}

std::string GrowingText::finish() {
  const std::string before = stops_.push(decoder_.finish());
  return show(before + stops_.finish());
}

std::string GrowingText::show(std::string piece) {
  text_ += piece;
  return piece;
}

TextWriter::TextWriter(std::ostream& out, std::vector<GrowingText> texts, bool json,
                       std::int64_t max_tokens)
    : out_(out), texts_(std::move(texts)), json_(json), max_tokens_(max_tokens) {
  if (streams()) {
    out_ << texts_.front().prompt() << std::flush;
  }
}

bool TextWriter::push(std::size_t index, std::int64_t token) {
  GrowingText& text = texts_[index];
  const std::string piece = text.push(token);
  if (streams()) {
    out_ << piece << std::flush;
  }
  // Generation also stops if the output stream has failed.
  return !text.stopped() && out_.good();
}

void TextWriter::finish() {
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    GrowingText& text = texts_[i];
    const std::string rest = text.finish();
    if (json_) {
      out_ << json_of(text) << '\n';
    } else if (streams()) {
      out_ << rest << '\n';
    } else {
      out_ << "--- " << i + 1 << " of " << texts_.size() << " ---\n"
           << text.prompt() << text.text() << '\n';
    }
  }
  out_ << std::flush;
}

std::string TextWriter::json_of(const GrowingText& text) const {
  const bool full = std::ssize(text.tokens()) == max_tokens_;
  const char* ended = full ? "length" : "end";
  const nlohmann::ordered_json json = {{"prompt", text.prompt()},
                                       {"text", text.text()},
                                       {"tokens", text.tokens()},
                                       {"finish", text.stopped() ? "stop" : ended}};
  // Invalid UTF-8 is replaced, because tokens may be single bytes.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// ---- Prompts.

namespace {

PromptText prompt_of_json(const std::string& line, const std::string& place) {
  const tessera::data::JsonTexts prompt =
      tessera::data::json_text_lists(line, {"prompt"}, place).front();
  TESSERA_CHECK(prompt.texts.size() == 1 && !prompt.texts.front().empty(), place,
                ": \"prompt\" is empty or has several texts; write {\"prompt\": \"...\"} in each "
                "line");
  return {prompt.texts.front(), prompt.is_list};
}

std::vector<PromptText> prompts_of(const std::string& file, const std::string& content) {
  const bool is_json = file.ends_with(".jsonl");
  std::istringstream lines(content);
  std::vector<PromptText> prompts;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
    if (!line.empty()) {
      const std::string place = file + ":" + std::to_string(number);
      prompts.push_back(is_json ? prompt_of_json(line, place) : PromptText{line});
    }
  }
  TESSERA_CHECK(!prompts.empty(), file, " holds no prompt; write one a line");
  return prompts;
}

/// The --prompts value that stands for standard input.
constexpr const char* kStandardInput = "-";

/// The maximum of --max-tokens for a model without max_position_embeddings.
constexpr std::int64_t kMostTokensWithoutPositions = 1'000'000;

}  // namespace

std::vector<PromptText> prompt_texts(const GenerateOptions& options, const std::string& input) {
  std::vector<PromptText> prompts;
  for (const std::string& text : options.prompt) {
    prompts.push_back({text});
  }
  for (const std::string& file : options.prompts) {
    const std::vector<PromptText> some = file == kStandardInput
                                             ? prompts_of("standard input", input)
                                             : prompts_of(file, tessera::data::read_text(file));
    prompts.insert(prompts.end(), some.begin(), some.end());
  }
  return prompts;
}

std::string standard_input(const GenerateOptions& options, const tessera::DeviceMesh& mesh) {
  if (std::ranges::find(options.prompts, kStandardInput) == options.prompts.end()) {
    return "";
  }
  std::string text;
  if (mesh.local_rank() == 0) {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  return mesh.size() == 1
             ? text
             : tessera::comm::gather_texts(mesh.group(), c10::Device(options.device), text).front();
}

std::string check_positions(const Config& config, std::int64_t longest, std::int64_t max_tokens) {
  const std::int64_t most = config.max_positions;
  // --max-tokens is checked before the cache is allocated. Its default is always accepted.
  const std::int64_t limit = most == 0 ? kMostTokensWithoutPositions : most;
  TESSERA_CHECK(max_tokens <= std::max(limit, SamplingOptions{}.max_tokens), "--max-tokens ",
                max_tokens, " is more than the ", limit,
                " positions that the model is made for; take fewer");
  TESSERA_CHECK(most == 0 || longest <= most, "a prompt has ", longest,
                " tokens, but the model is made for ", most, " positions; shorten it");
  if (most == 0 || longest + max_tokens <= most) {
    return "";
  }
  return fmt::format(
      "warning: a text may have {} tokens, but the model is made for {} positions; what "
      "follows them may be poor",
      longest + max_tokens, most);
}

PromptEncoder::PromptEncoder(const std::string& folder, const std::string& file,
                             const Config& config)
    : tokenizer_(open_tokenizer(file, folder, config, /*new_to_text=*/false)),
      special_(read_special_tokens(folder, config)),
      begin_(text_begin(*tokenizer_, special_)) {}

Tokens PromptEncoder::with_begin_tokens(const Tokens& tokens) const {
  Tokens all = begin_;
  all.insert(all.end(), tokens.begin(), tokens.end());
  return all;
}

// ---- The generation loop.

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Prompts as one batch, padded on the left, so that all prompts end at the same position.
struct Batch {
  explicit Batch(const std::vector<Tokens>& prompts);

  std::int64_t longest = 0, tokens_in_all = 0;
  std::vector<std::int64_t> padding;
  at::Tensor tokens;  ///< the padded prompts, (texts, longest prompt)
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

/// Rank 0's decisions after each forward: the next tokens, and which texts continue.
class Chooser {
 public:
  Chooser(const SamplingOptions& options, const std::vector<Tokens>& prompts, const Tokens& end,
          const TokenSink& sink)
      : sampler_(options, prompts), end_(end), sink_(sink), goes_on_(prompts.size(), true) {}

  /// A finished text retains its row of the batch; its further tokens are dropped.
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

/// Broadcasts rank 0's tokens. The tokens are not computed on each rank, because the arithmetic of
/// sampling may differ between hosts with different processors, and the ranks would not notice that
/// their texts differ.
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
  // No gradients are recorded, because the cache would otherwise retain the autograd graph of every
  // token.
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
    // From now on each call has one token per text; the cache has the earlier tokens.
    input = at::tensor(next, c10::kLong).unsqueeze(1).to(device);
  }
  times.decoding_s = seconds_since(start) - times.prompt_s;
  times.tokens = chooser.given() - first_tokens;
  return times;
}

// ---- Perplexity.

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
  // The loss includes tokens [1, predicted); token 0 is never predicted.
  std::int64_t predicted = 1;
  for (std::int64_t begin = 0; predicted <= last; begin += stride) {
    const std::int64_t end = std::min(begin + window, last);
    const at::Tensor inputs = tokens.slice(0, begin, end).unsqueeze(0).to(model.device());
    const at::Tensor targets = tokens.slice(0, begin + 1, end + 1).clone();
    targets.slice(0, 0, predicted - begin - 1).fill_(options.ignore_index);
    // The loss is computed in chunks of tokens (HeadLoss), because the logits of a window may take
    // gigabytes.
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

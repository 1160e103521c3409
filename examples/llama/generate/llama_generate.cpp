// llama_generate: continues texts, or prints the perplexity of a text.

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/generate/generate.h"
#include "examples/llama/generate/generate_options.h"
#include "examples/llama/start.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/data/tokenizer.h"
#include "tessera/kernels/products.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tessera.hpp"

namespace {

using namespace tessera;
using namespace llama;

// ---- The texts of a batch.

struct GrowingText {
  std::string prompt;
  data::StreamDecoder decoder;
  std::string text = {};  ///< generated text; excludes an incomplete UTF-8 character at the end
  Tokens tokens = {};
};

/// Writes generated texts. A single text is written token by token; several texts, or JSON, are
/// written when the generation of all texts has ended.
class TextWriter {
 public:
  TextWriter(std::ostream& out, std::vector<GrowingText> texts, bool json, std::int64_t max_tokens)
      : out_(out), texts_(std::move(texts)), json_(json), max_tokens_(max_tokens) {
    if (streams()) {
      out_ << texts_.front().prompt << std::flush;
    }
  }

  /// Appends a token to the text with index `index`. Returns false if writing the output failed.
  bool push(std::size_t index, std::int64_t token) {
    GrowingText& text = texts_[index];
    text.tokens.push_back(token);
    const std::string piece = text.decoder.push(token);
    text.text += piece;
    if (streams()) {
      out_ << piece << std::flush;
    }
    return out_.good();
  }

  void finish() {
    for (std::size_t i = 0; i < texts_.size(); ++i) {
      GrowingText& text = texts_[i];
      const std::string rest = text.decoder.finish();  // bytes of an incomplete UTF-8 character
      text.text += rest;
      if (json_) {
        out_ << json_of(text) << '\n';
      } else if (streams()) {
        out_ << rest << '\n';
      } else {
        out_ << "--- " << i + 1 << " of " << texts_.size() << " ---\n"
             << text.prompt << text.text << '\n';
      }
    }
    out_ << std::flush;
  }

 private:
  bool streams() const { return texts_.size() == 1 && !json_; }

  std::string json_of(const GrowingText& text) const {
    const bool full = std::ssize(text.tokens) == max_tokens_;
    const nlohmann::ordered_json json = {{"prompt", text.prompt},
                                         {"text", text.text},
                                         {"tokens", text.tokens},
                                         {"finish", full ? "length" : "end"}};
    // Invalid UTF-8 is replaced, because a token can be a single byte of a character.
    return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }

  std::ostream& out_;
  std::vector<GrowingText> texts_;
  bool json_;
  std::int64_t max_tokens_;
};

// ---- Prompts.

/// The largest accepted --max-tokens if the model's config.json has no max_position_embeddings.
constexpr std::int64_t kMostTokensWithoutPositions = 1'000'000;

/// Throws Error if the model cannot compute a prompt of `longest` tokens followed by `max_tokens`
/// tokens. Returns a warning if the tokens exceed max_position_embeddings; otherwise "".
std::string check_positions(const Config& config, std::int64_t longest, std::int64_t max_tokens) {
  const std::int64_t most = config.max_positions;
  // --max-tokens is checked before the KV cache is allocated. The flag's default is always valid.
  const std::int64_t limit = most == 0 ? kMostTokensWithoutPositions : most;
  TESSERA_CHECK(max_tokens <= std::max(limit, SamplingOptions{}.max_tokens), "--max-tokens ",
                max_tokens, " is more than the ", limit,
                most == 0 ? " that are allowed" : " positions of the model",
                "; pass a smaller --max-tokens");
  TESSERA_CHECK(most == 0 || longest <= most, "a prompt has ", longest,
                " tokens, but the model has ", most, " positions; shorten the prompt");
  if (most == 0 || longest + max_tokens <= most) {
    return "";
  }
  return fmt::format(
      "warning: a text may have {} tokens, but the model has {} positions; the text after the last "
      "position may be poor",
      longest + max_tokens, most);
}

/// Throws Error on every rank if the texts of a rank differ from the texts of rank 0. Collective.
void check_same_texts(comm::World& world, const std::vector<Tokens>& texts) {
  const std::vector<std::string> all =
      comm::texts_that_differ(*start_group(world), nlohmann::json(texts).dump());
  const auto other = std::ranges::find_if(all, [&](auto& text) { return text != all.front(); });
  TESSERA_CHECK(other == all.end(), "rank ", other - all.begin(),
                " has other input tokens than rank 0; pass equal files to all ranks");
}

// ---- The generation loop.

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A batch of all prompts, padded on the left, so that all prompts end at the same position.
struct Batch {
  explicit Batch(const std::vector<Tokens>& prompts) {
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

  std::int64_t longest = 0, tokens_in_all = 0;
  std::vector<std::int64_t> padding;
  at::Tensor tokens;  ///< token ids of the padded prompts: (texts, longest prompt)
};

struct GenerationTimes {
  std::int64_t prompt_tokens = 0;
  double prompt_s = 0;      ///< seconds until each text has its first token
  std::int64_t tokens = 0;  ///< number of tokens after the first token of each text
  double decoding_s = 0;
};

/// A function that receives each generated token of text `index`, and returns whether the text
/// continues.
using TokenSink = std::function<bool(std::size_t index, std::int64_t token)>;

/// Used on rank 0. Samples the next token of each text, and records which texts have ended.
class Chooser {
 public:
  Chooser(const SamplingOptions& options, std::size_t texts, const Tokens& end,
          const TokenSink& sink)
      : sampler_(options), end_(end), sink_(sink), goes_on_(texts, true) {}

  /// Returns the next token of each text. For a text that has ended, `sink_` gets no more tokens.
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

/// Broadcasts rank 0's tokens to all ranks. If every rank sampled tokens, ranks with different
/// processors could choose different tokens, and no rank would notice.
Tokens of_rank_0(Tokens own, comm::Communicator* ranks, c10::Device device) {
  if (ranks == nullptr || ranks->size() == 1) {
    return own;
  }
  const at::Tensor shared = at::tensor(own, c10::kLong).to(device);
  ranks->broadcast(shared, 0)->wait();
  const at::Tensor on_host = shared.to(c10::kCPU);
  std::copy_n(on_host.const_data_ptr<std::int64_t>(), own.size(), own.begin());
  return own;
}

/// Continues `prompts` as one batch with a key-value cache. A text ends at one of the tokens `end`,
/// or after options.max_tokens. The other prompts of the batch change a text only by rounding.
/// `ranks`: the ranks that compute the model together; nullptr for one rank. Collective over
/// `ranks`: rank 0 chooses the tokens and calls `sink`. Throws Error for an empty prompt.
GenerationTimes generate_texts(Llama& model, const std::vector<Tokens>& prompts,
                               const SamplingOptions& options, const Tokens& end,
                               const TokenSink& sink, comm::Communicator* ranks) {
  // With gradients, the key-value cache would retain the autograd graph of every token.
  const c10::NoGradGuard no_grad;
  const Batch batch(prompts);
  const c10::Device device = model.device();
  const bool chooses = ranks == nullptr || ranks->rank() == 0;
  Chooser chooser(options, prompts.size(), end, sink);
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
    // Each forward after the first gets one token per text; the KV cache has the earlier tokens.
    input = at::tensor(next, c10::kLong).unsqueeze(1).to(device);
  }
  times.decoding_s = seconds_since(start) - times.prompt_s;
  times.tokens = chooser.given() - first_tokens;
  return times;
}

// ---- Perplexity.

struct TextLoss {
  std::int64_t tokens = 0;
  double mean = 0;  ///< negative log likelihood per token, in nats; exp(mean): perplexity
};

/// Returns the mean loss of all tokens but the first. The model reads windows of `window` tokens,
/// `stride` tokens apart. Each token is predicted once, in the first possible window. A smaller
/// `stride` gives more context and takes longer. Collective if logits are split over the
/// vocabulary. Throws Error for fewer than two tokens.
TextLoss text_loss(Llama& model, const Tokens& text, std::int64_t window, std::int64_t stride) {
  const tensor_parallel::CrossEntropyOptions options{.reduction = at::Reduction::Sum};
  const c10::NoGradGuard no_grad;
  TESSERA_CHECK(text.size() >= 2, "the text of --perplexity has ", text.size(),
                text.size() == 1 ? " token" : " tokens",
                ", but needs two tokens or more, because the first token is not predicted; pass a "
                "longer text");
  const at::Tensor tokens = at::tensor(text, c10::kLong);
  const std::int64_t last = std::ssize(text) - 1;
  double sum = 0;
  // `sum` is the sum of the losses of tokens 1 to predicted - 1. Token 0 is never predicted.
  std::int64_t predicted = 1;
  for (std::int64_t begin = 0; predicted <= last; begin += stride) {
    const std::int64_t end = std::min(begin + window, last);
    const at::Tensor inputs = tokens.slice(0, begin, end).unsqueeze(0).to(model.device());
    const at::Tensor targets = tokens.slice(0, begin + 1, end + 1).clone();
    targets.slice(0, 0, predicted - begin - 1).fill_(options.ignore_index);
    // HeadLoss computes the loss in chunks of tokens, because the logits of a window can take
    // gigabytes.
    const HeadLoss head{targets.to(model.device()), {.loss = options}, {}};
    sum += model(inputs, head).item<double>();
    predicted = end + 1;
  }
  return {last, sum / static_cast<double>(last)};
}

// ---- The run.

/// Loads this rank's weights of options.model in the dtype options.dtype. The rotary tables have
/// `positions` rows. With `split_logits`, the logits are split over the vocabulary; otherwise each
/// rank gets all logits. Collective.
std::shared_ptr<Llama> load_model(const GenerateOptions& options, const Config& config,
                                  std::int64_t positions, const DeviceMesh& mesh,
                                  bool split_logits) {
  std::shared_ptr<Llama> model;
  {
    const nn::MetaDevice meta;
    model = std::make_shared<Llama>(config, positions);
  }
  model->to(scalar_type(options.dtype));
  apply_tensor_parallel(*model, mesh, {.sequence_parallel = false, .loss_parallel = split_logits});
  nn::to_empty(*model, c10::Device(options.device));
  // Computes the rotary tables, which the files do not contain.
  nn::init_buffers(*model);
  checkpoint::load_hugging_face(*model, *mesh.world(), options.model);
  nn::check_initialized(*model);
  model->eval();
  {
    // This forward records an autograd graph. Tensor parallelism searches the graph for parameters
    // that the tensor-parallel plan does not cover.
    const c10::AutoGradMode gradients(true);
    (*model)(at::zeros({1, 1}, at::device(c10::Device(options.device)).dtype(c10::kLong)));
  }
  nn::freeze(*model, {"**"});  // no gradients are recorded: generation has no backward
  return model;
}

struct Run {
  const GenerateOptions& options;
  Config config;
  data::TokenizerPtr tokenizer;
  SpecialTokens special;
  DeviceMesh mesh;

  bool prints() const { return mesh.local_rank() == 0; }
  Tokens with_begin_tokens(const Tokens& tokens) const {
    Tokens all = text_begin(*tokenizer, special);
    all.insert(all.end(), tokens.begin(), tokens.end());
    return all;
  }
};

/// Prints a line on rank 0, in one write, because several ranks can share the stream.
void note(const Run& run, const std::string& line) {
  if (run.prints()) {
    std::cerr << line + "\n" << std::flush;
  }
}

double per_second(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

struct Prompts {
  std::vector<Tokens> inputs;
  std::vector<GrowingText> texts;
  std::int64_t longest = 0;
};

Prompts read_prompts(const Run& run) {
  Prompts prompts;
  for (const auto& [text, is_whole] : prompt_texts(run.options)) {
    const Tokens tokens = run.tokenizer->encode(text);
    prompts.inputs.push_back(is_whole ? tokens : run.with_begin_tokens(tokens));
    prompts.longest = std::max(prompts.longest, std::ssize(prompts.inputs.back()));
    if (run.prints()) {
      prompts.texts.push_back({text, data::StreamDecoder(run.tokenizer, tokens)});
    }
  }
  check_same_texts(*run.mesh.world(), prompts.inputs);
  return prompts;
}

void continue_prompts(const Run& run) {
  Prompts prompts = read_prompts(run);
  const SamplingOptions& sampling = run.options.sampling;
  if (const std::string warning = check_positions(run.config, prompts.longest, sampling.max_tokens);
      !warning.empty()) {
    note(run, warning);
  }
  const auto model =
      load_model(run.options, run.config, prompts.longest + sampling.max_tokens, run.mesh,
                 /*split_logits=*/false);
  TextWriter writer(std::cout, std::move(prompts.texts), run.options.json, sampling.max_tokens);
  const auto sink = [&](std::size_t index, std::int64_t token) {
    return writer.push(index, token);
  };
  const GenerationTimes times =
      generate_texts(*model, prompts.inputs, sampling, run.special.end, sink,
                     run.mesh.size() > 1 ? &run.mesh.group() : nullptr);
  writer.finish();
  note(run, fmt::format("prompt: {} tokens, {:.1f} tokens/s; decoding: {} tokens, {:.1f} tokens/s",
                        times.prompt_tokens, per_second(times.prompt_tokens, times.prompt_s),
                        times.tokens, per_second(times.tokens, times.decoding_s)));
}

void measure_perplexity(const Run& run) {
  const GenerateOptions& options = run.options;
  constexpr std::int64_t kDefaultWindow = 2048;
  const std::int64_t most = run.config.max_positions;
  TESSERA_CHECK(most == 0 || options.seq <= most, "--seq ", options.seq, " is more than the ", most,
                " positions of the model; pass a smaller --seq");
  const std::int64_t by_default = most == 0 ? kDefaultWindow : std::min(most, kDefaultWindow);
  const std::int64_t window = options.seq > 0 ? options.seq : by_default;
  const std::int64_t stride = options.stride > 0 ? options.stride : window;
  TESSERA_CHECK(stride <= window, "--stride ", stride, " is more than --seq ", window,
                ", so tokens between two windows would be left out; pass a smaller --stride");
  const Tokens text =
      run.with_begin_tokens(run.tokenizer->encode(data::read_text(options.perplexity)));
  check_same_texts(*run.mesh.world(), {text});
  const auto model = load_model(options, run.config, window, run.mesh, /*split_logits=*/true);
  const TextLoss loss = text_loss(*model, text, window, stride);
  const double perplexity = std::exp(loss.mean);
  TESSERA_CHECK(std::isfinite(perplexity), "the perplexity of '", options.perplexity,
                "' is not finite, because the mean loss is ", loss.mean,
                "; check the model's weights, or pass --dtype fp32");
  if (run.prints()) {
    std::cout << (options.json
                      ? fmt::format(R"({{"tokens": {}, "perplexity": {:.8g}}})", loss.tokens,
                                    perplexity)
                      : fmt::format("tokens: {}  perplexity: {:.6f}", loss.tokens, perplexity))
              << std::endl;
  }
}

int run_generate(std::vector<std::string> arguments) {
  const GenerateOptions options = parse_generate_options(std::move(arguments));
  const comm::WorldScope scope(comm::world_from_environment(
      {.device = options.device, .backend = options.device == "cuda" ? "nccl" : "gloo"}));
  Config config = read_config(std::filesystem::path(options.model) / "config.json");
  check_same_start(*scope.world(), options.shared, config);
  const data::TokenizerPtr tokenizer =
      open_tokenizer(options.tokenizer, options.model, config, /*new_to_text=*/false);
  const SpecialTokens special = read_special_tokens(options.model, config);
  const int ranks = scope.world()->size();
  TESSERA_CHECK(options.tp == ranks, "--tp ", options.tp, " needs ", options.tp,
                options.tp == 1 ? " rank" : " ranks", ", but ", ranks, ranks == 1 ? " is" : " are",
                " running; start ", options.tp, " (tessera-run --nproc ", options.tp,
                ") or change --tp");
  const Run run{options, config, tokenizer, special,
                init_device_mesh(scope.world(), {options.tp}, {"tp"})};
  if (const std::string copies = describe_key_value_copies(config, options.tp); !copies.empty()) {
    note(run, copies);
  }
  const StrictScope strict;
  try {
    (options.perplexity.empty() ? continue_prompts : measure_perplexity)(run);
  } catch (const c10::Error& error) {
    // libtorch throws c10::Error, for example out of memory. what() would include a stack trace.
    fail("rank ", scope.world()->rank(), ": ", error.what_without_backtrace());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  tessera::kernels::use_fast_products();
  return llama::run_program("llama_generate", argc, argv, run_generate);
}

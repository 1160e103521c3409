#include "examples/llama/generate/generate_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// The smallest temperature above 0. Logits divided by a smaller temperature can overflow.
constexpr double kLeastTemperature = 1e-6;

// The number in brackets in each help text is the default.

void declare(CLI::App& app, GenerateOptions& o) {
  app.option_defaults()->group("model");
  app.add_option("--model", o.model, "Folder with config.json and *.safetensors")
      ->option_text("DIR");
  app.add_option("--tokenizer", o.tokenizer,
                 "tokenizer.json or tokenizer.model (default: the model's own)")
      ->option_text("FILE");
  app.option_defaults()->group("text");
  app.add_option("--prompt", o.prompt, "Text to continue; several texts form one batch")
      ->allow_extra_args(false)
      ->option_text("TEXT");
  app.add_option("--prompts", o.prompts,
                 "Text file with one prompt per line, or .jsonl file with the field \"prompt\" in "
                 "each line; may be given several times")
      ->allow_extra_args(false)
      ->option_text("FILE");
  app.add_flag("--json", o.json, "Print one JSON object per prompt");
  SamplingOptions& sampling = o.sampling;
  app.option_defaults()->group("sampling");
  app.add_option("--max-tokens", sampling.max_tokens, "Maximum number of new tokens (200)")
      ->check(number_above_0());
  app.add_option("--temperature", sampling.temperature,
                 "0: always choose the likeliest token (0.8)")
      ->check(number_between(0, 1e6));
  app.add_option("--top-k", sampling.top_k, "Sample from the k likeliest tokens; 0: all tokens (0)")
      ->check(number_of_at_least_0());
  app.add_option("--top-p", sampling.top_p,
                 "Sample from the likeliest tokens that have this total probability (1.0)")
      ->check(number_above_0_to(1));
  app.add_option("--seed", sampling.seed, "Seed of sampling (0)")->check(number_of_at_least_0());
  app.option_defaults()->group("perplexity");
  app.add_option("--perplexity", o.perplexity,
                 "Text file: print the perplexity of the text instead of continuing prompts")
      ->option_text("FILE");
  app.add_option("--seq", o.seq,
                 "Tokens per window of --perplexity (the model's positions, at most 2048)")
      ->check(number_above_0());
  app.add_option("--stride", o.stride, "Tokens between the starts of two windows (--seq)")
      ->check(number_above_0());
  app.option_defaults()->group("parallelism");
  app.add_option("--tp", o.tp, "Tensor-parallel degree: the number of ranks (1)")
      ->check(number_between(1, 1'000'000));
  app.add_option("--device", o.device, "cpu or cuda (cpu)")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", o.dtype,
                 "Type of weights and computation: fp32, bf16 or fp16 (bf16 on CUDA, fp32 on CPU)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
}

/// Required flags are checked here instead of by CLI11's required(), so that messages say what to
/// pass.
void check_consistent(const CLI::App& app, const GenerateOptions& o) {
  TESSERA_CHECK(!o.model.empty(), "no model given; pass --model DIR");
  const bool measures = !o.perplexity.empty();
  const bool has_prompt = !o.prompt.empty() || !o.prompts.empty();
  TESSERA_CHECK(measures || has_prompt,
                "no prompt given; pass --prompt TEXT, --prompts FILE or --perplexity FILE");
  TESSERA_CHECK(!measures || !has_prompt,
                "--perplexity and a prompt are both given; pass one of them");
  TESSERA_CHECK(o.prompt.empty() || o.prompts.empty(),
                "--prompt and --prompts are both given; pass one of them");
  TESSERA_CHECK(std::ranges::none_of(o.prompt, &std::string::empty),
                "--prompt is empty; pass at least one character");
  const double temperature = o.sampling.temperature;
  TESSERA_CHECK(temperature == 0 || temperature >= kLeastTemperature, "--temperature ", temperature,
                " is less than ", kLeastTemperature,
                ", too small to compute probabilities; pass 0 for the likeliest token");
  TESSERA_CHECK(measures || (o.seq == 0 && o.stride == 0), o.seq > 0 ? "--seq" : "--stride",
                " is given, but works only with --perplexity; leave the flag out");
  TESSERA_CHECK(o.stride == 0 || o.seq == 0 || o.stride <= o.seq, "--stride ", o.stride,
                " is more than --seq ", o.seq,
                ", so tokens between two windows would be left out; pass a smaller --stride");
  for (const char* flag : {"--max-tokens", "--temperature", "--top-k", "--top-p", "--seed"}) {
    TESSERA_CHECK(!measures || app.get_option(flag)->count() == 0, flag,
                  " is given, but has no effect with --perplexity; leave the flag out");
  }
}

}  // namespace

GenerateOptions parse_generate_options(std::vector<std::string> arguments) {
  GenerateOptions o;
  CLI::App app(
      "Continues texts with a model in Hugging Face's format, or measures the perplexity of a "
      "text. For --tp, start llama_generate under tessera-run.",
      "llama_generate");
  declare(app, o);
  parse_command_line(app, std::move(arguments), {{"prompt", "prompts", "perplexity"}});
  if (o.dtype.empty()) {
    o.dtype = o.device == "cuda" ? "bf16" : "fp32";
  }
  check_consistent(app, o);
  o.shared = shared_by_ranks(resolve_flags(app));
  return o;
}

}  // namespace llama

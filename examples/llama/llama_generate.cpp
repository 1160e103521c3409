// Continues a prompt with a model in Hugging Face's form.

#include <iostream>

#include "examples/llama/cli.h"
#include "examples/llama/sampling.h"

namespace {

using namespace tessera;

struct Options {
  std::string model, prompt, tokenizer;
  llama::SamplingOptions sampling;
};

Options parse(std::vector<std::string> arguments) {
  Options o;
  CLI::App app("Continues a prompt with a Llama in Hugging Face's form.", "llama_generate");
  app.add_option("--model", o.model, "Folder with config.json and *.safetensors")
      ->option_text("DIR");
  app.add_option("--prompt", o.prompt, "Text to continue")->option_text("TEXT");
  app.add_option("--tokenizer", o.tokenizer, "SentencePiece model (default: bytes)")
      ->option_text("FILE");
  app.add_option("--max-tokens", o.sampling.max_tokens, "Tokens to make (200)")
      ->check(CLI::PositiveNumber);
  app.add_option("--temperature", o.sampling.temperature, "0 is greedy (0.8)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-k", o.sampling.top_k, "Only the k likeliest; 0 is all (0)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", o.sampling.top_p, "Smallest set of this probability (1.0)")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", o.sampling.seed, "Seed of the draws (0)");
  try {
    llama::parse_command_line(app, std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    throw;
  }
  TESSERA_CHECK(!o.model.empty(), "no model given; pass --model DIR");
  TESSERA_CHECK(!o.prompt.empty(), "no prompt given; pass --prompt TEXT");
  return o;
}

data::TokenizerPtr open_tokenizer(const Options& options, const llama::Config& config) {
  data::TokenizerPtr tokenizer = options.tokenizer.empty()
                                     ? data::byte_tokenizer()
                                     : data::sentencepiece_tokenizer(options.tokenizer);
  TESSERA_CHECK(tokenizer->vocabulary() <= config.vocab_size, "the tokenizer has ",
                tokenizer->vocabulary(), " tokens, but the model's vocabulary is ",
                config.vocab_size, "; pass the --tokenizer it was trained with");
  return tokenizer;
}

void run(std::vector<std::string> arguments) {
  const Options options = parse(std::move(arguments));
  const llama::Config config =
      llama::read_config(std::filesystem::path(options.model) / "config.json");
  const data::TokenizerPtr tokenizer = open_tokenizer(options, config);
  const std::vector<std::int64_t> prompt = tokenizer->encode(options.prompt);

  const auto positions = static_cast<std::int64_t>(prompt.size()) + options.sampling.max_tokens;
  llama::Llama model(config, positions);
  nn::init_buffers(model);
  checkpoint::load_hugging_face(model, options.model);
  nn::check_initialized(model);
  std::vector<std::int64_t> tokens = prompt;
  std::string shown = options.prompt;
  std::cout << shown << std::flush;
  llama::generate(model, prompt, options.sampling, [&](std::int64_t token) {
    tokens.push_back(token);
    // Decoding the whole keeps pieces that join over token borders right.
    const std::string text = tokenizer->decode(tokens);
    std::cout << text.substr(std::min(shown.size(), text.size())) << std::flush;
    shown = text;
  });
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  return llama::run_program("llama_generate", argc, argv, run);
}

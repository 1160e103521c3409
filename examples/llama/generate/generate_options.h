// The options of llama_generate. They are apart from the sampling itself, so that the command line
// compiles without the model.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llama {

/// How tokens are drawn; the defaults of the command line. Names and meanings are transformers'.
struct SamplingOptions {
  std::int64_t max_tokens = 200;
  double temperature = 0.8;  ///< 0: greedy
  std::int64_t top_k = 0;    ///< 0: all
  double top_p = 1.0;
  double min_p = 0;               ///< 0: all
  double repetition_penalty = 1;  ///< 1: none
  std::uint64_t seed = 0;
};

/// The flags of llama_generate; see its --help.
struct GenerateOptions {
  std::string model, tokenizer;
  std::vector<std::string> prompt, stop;
  std::vector<std::string> prompts;  ///< files of them
  bool json = false;
  SamplingOptions sampling;

  std::string perplexity;            ///< a file of text; "": generate
  std::int64_t seq = 0, stride = 0;  ///< 0: not given

  std::int64_t tp = 1;
  std::string device = "cpu", dtype;

  std::map<std::string, std::string> shared;  ///< by flag, what all ranks must have alike
};

/// Throws tessera::Error for flags that are wrong or missing.
GenerateOptions parse_generate_options(std::vector<std::string> arguments);

}  // namespace llama

// The options of llama_generate. The code that parses the command line includes only this header,
// not the headers of the model.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llama {

/// Sampling options with the command line's defaults. Names and meanings are those of
/// `transformers`.
struct SamplingOptions {
  std::int64_t max_tokens = 200;
  double temperature = 0.8;  ///< sampling temperature; 0: always the most likely token
  std::int64_t top_k = 0;    ///< number of most likely tokens to sample from; 0: all tokens
  double top_p = 1.0;
  std::uint64_t seed = 0;
};

struct GenerateOptions {
  std::string model, tokenizer;
  std::vector<std::string> prompt;
  std::vector<std::string> prompts;  ///< paths of files that contain prompts
  bool json = false;
  SamplingOptions sampling;

  std::string perplexity;            ///< a text file whose perplexity is printed; "": generate
  std::int64_t seq = 0, stride = 0;  ///< window and stride of --perplexity in tokens; 0: not given

  std::int64_t tp = 1;
  std::string device = "cpu", dtype;

  std::map<std::string, std::string> shared;
};

/// Parses the command line of llama_generate. Throws tessera::Error for wrong or missing flags.
GenerateOptions parse_generate_options(std::vector<std::string> arguments);

}  // namespace llama

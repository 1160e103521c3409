#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llama {

/// The flags of llama_tokenize; see llama_tokenize --help.
struct TokenizeOptions {
  std::string tokenizer, out;
  std::vector<std::string> files;  ///< input files: paths or globs
  bool jsonl = false;
  std::string field = "text";
  bool bos = false, eos = true;
  std::string eos_token;  ///< id or text of the end token; "": from the tokenizer or its folder
  std::int64_t shard_tokens = 100'000'000;
  int threads = 0;
};

/// Parses the command line. Throws tessera::Error for all errors that can be detected without
/// reading the files.
TokenizeOptions parse_tokenize_options(std::vector<std::string> arguments);

}  // namespace llama

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llama {

/// The flags of llama_tokenize; see its --help.
struct TokenizeOptions {
  std::string tokenizer, out;
  std::vector<std::string> files;  ///< paths or globs
  bool jsonl = false;
  std::string field = "text";
  bool bos = false, eos = true;
  std::string eos_token;  ///< an id or its text; "": what the tokenizer or its folder says
  std::int64_t shard_tokens = 100'000'000;
  int threads = 0;
};

/// Throws tessera::Error for anything that can be told wrong without the files.
TokenizeOptions parse_tokenize_options(std::vector<std::string> arguments);

}  // namespace llama

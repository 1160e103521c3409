#include "examples/llama/tokenize/tokenize_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <thread>
#include <utility>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// The maximum token count that a shard's header can represent.
constexpr std::int64_t kMostTokens = (std::int64_t{1} << 31) - 1;

void declare(CLI::App& app, TokenizeOptions& o) {
  app.add_option("--tokenizer", o.tokenizer,
                 "tokenizer.json or tokenizer.model, or the folder of a model")
      ->option_text("FILE|DIR|ORG/NAME")
      ->transform(hub_name(tessera::HubItem::kTokenizer));
  app.add_option("--out", o.out, "Writes PREFIX_000000.bin, PREFIX_000001.bin and so on")
      ->option_text("PREFIX");
  app.add_option("files", o.files, "Text or JSONL files, also gzip's or zstd's; globs, in quotes")
      ->option_text("FILES...");
  app.add_flag("--jsonl", o.jsonl,
               "All files are JSONL (those named .jsonl, .json or .ndjson, also with .gz or .zst)");
  app.add_option("--field", o.field, "The field of a JSONL object that has the text (text)");
  app.add_flag("--bos,!--no-bos", o.bos, "Documents begin with the tokenizer's begin token (no)");
  app.add_flag("--eos,!--no-eos", o.eos, "Documents end with the end token (yes)");
  app.add_option("--eos-token", o.eos_token,
                 "The end token (the tokenizer's, or eos_token_id in the folder of --tokenizer)")
      ->option_text("ID|TEXT");
  app.add_option("--shard-tokens", o.shard_tokens, "Tokens a shard (100000000)")
      ->check(number_between(1, kMostTokens));
  app.add_option("--threads", o.threads,
                 "That tokenize at the same time (the machine's, at most 16)")
      ->check(number_between(1, 256));
}

}  // namespace

TokenizeOptions parse_tokenize_options(std::vector<std::string> arguments) {
  TokenizeOptions o;
  CLI::App app("Tokenizes files into shards for llama_train --tokens, in llm.c's form.",
               "llama_tokenize");
  declare(app, o);
  parse_command_line(app, std::move(arguments));
  TESSERA_CHECK(!o.tokenizer.empty(), "no tokenizer given; pass --tokenizer FILE");
  TESSERA_CHECK(!o.out.empty(), "no --out given; pass the PREFIX of the shards' names");
  TESSERA_CHECK(!o.out.ends_with('/'), "--out '", o.out,
                "' is a folder; add the PREFIX of the shards' names, such as ", o.out, "train");
  TESSERA_CHECK(!o.files.empty(), "no files given; name text or JSONL files");
  TESSERA_CHECK(o.eos || o.eos_token.empty(),
                "--eos-token is given with --no-eos; leave one of them out");
  if (o.threads == 0) {
    o.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  }
  return o;
}

}  // namespace llama

// llama_tokenize: converts text to token shards. One thread reads and writes; other threads
// tokenize. Tokens are written in the order of the text. kBytesUnderWay limits the text in memory.

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <future>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/start.h"
#include "examples/llama/texts/texts.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"
#include "tessera/data/token_shards.h"
#include "tessera/data/tokenizer.h"

namespace {

using namespace tessera;
using namespace llama;

struct TokenizeOptions {
  std::string tokenizer, out;
  std::vector<std::string> files;
  bool jsonl = false;
  std::string field = "text";
  bool bos = false, eos = true;
  std::string eos_token;  ///< id or text of the end token; "": from the tokenizer or its folder
  std::int64_t shard_tokens = 100'000'000;
  int threads = 0;
};

/// The maximum token count that a shard's header can represent.
constexpr std::int64_t kMostTokens = (std::int64_t{1} << 31) - 1;

void declare(CLI::App& app, TokenizeOptions& o) {
  app.add_option("--tokenizer", o.tokenizer,
                 "tokenizer.json, tokenizer.model, or the folder of a model")
      ->option_text("FILE|DIR");
  app.add_option("--out", o.out, "Writes PREFIX_000000.bin, PREFIX_000001.bin and so on")
      ->option_text("PREFIX");
  app.add_option("files", o.files,
                 "Text or JSONL files, or globs in quotes; gzip and zstd files are decompressed")
      ->option_text("FILES...");
  app.add_flag(
      "--jsonl", o.jsonl,
      "Read all files as JSONL (by default *.jsonl, *.json and *.ndjson, also with .gz or .zst)");
  app.add_option("--field", o.field, "Name of the field with the text in each JSONL object (text)");
  app.add_flag("--bos,!--no-bos", o.bos, "Put the tokenizer's begin token before documents (no)");
  app.add_flag("--eos,!--no-eos", o.eos, "Put the end token after documents (yes)");
  app.add_option(
         "--eos-token", o.eos_token,
         "Id or text of the end token (the tokenizer's, or eos_token_id in --tokenizer's folder)")
      ->option_text("ID|TEXT");
  app.add_option("--shard-tokens", o.shard_tokens, "Tokens per shard (100000000)")
      ->check(number_between(1, kMostTokens));
  app.add_option("--threads", o.threads, "Number of threads (the machine's, at most 16)")
      ->check(number_between(1, 256));
}

/// Parses the command line. Throws tessera::Error for all errors that can be detected without
/// reading the files.
TokenizeOptions parse_tokenize_options(std::vector<std::string> arguments) {
  TokenizeOptions o;
  CLI::App app("Tokenizes files into shards for llama_train --tokens, in llm.c's format.",
               "llama_tokenize");
  declare(app, o);
  parse_command_line(app, std::move(arguments));
  TESSERA_CHECK(!o.tokenizer.empty(), "no tokenizer given; pass --tokenizer FILE");
  TESSERA_CHECK(!o.out.empty(), "no --out given; pass the PREFIX of the shards' names");
  TESSERA_CHECK(!o.out.ends_with('/'), "--out '", o.out,
                "' is a folder; add the PREFIX of the shards' names, such as ", o.out, "train");
  TESSERA_CHECK(!o.files.empty(), "no files given; pass text or JSONL files");
  TESSERA_CHECK(o.eos || o.eos_token.empty(),
                "--eos-token is given with --no-eos; leave out one of the two");
  if (o.threads == 0) {
    o.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  }
  return o;
}

/// Returns the id of a token. `text`: the id in decimal digits, or the text of exactly one token.
std::int64_t token_of(const std::string& text, const data::Tokenizer& tokenizer) {
  const bool is_id = text.find_first_not_of("0123456789") == std::string::npos && text.size() < 10;
  const std::vector<std::int64_t> ids =
      is_id ? std::vector<std::int64_t>{std::stoll(text)} : tokenizer.encode(text);
  TESSERA_CHECK(ids.size() == 1, "--eos-token \"", text, "\" is encoded as ", ids.size(),
                " tokens; pass the id or the text of a single token");
  TESSERA_CHECK(ids[0] < tokenizer.vocabulary(), "--eos-token ", ids[0],
                " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary(),
                " tokens; pass a smaller id");
  return ids[0];
}

/// Tokenizes a long text in parts, to limit memory. cut_of() chooses the ends of the parts.
void encode_long(const data::Tokenizer& tokenizer, std::string_view text,
                 std::vector<std::int64_t>& tokens) {
  while (!text.empty()) {
    const std::size_t bytes =
        text.size() > kPieceBytes ? cut_of(text.substr(0, kPieceBytes + 1)) : text.size();
    const std::vector<std::int64_t> some = tokenizer.encode(text.substr(0, bytes));
    // Reserves memory for the tokens of the whole text, estimated from this part. A vector that
    // grows by doubling its capacity would need three times the memory.
    tokens.reserve(tokens.size() + some.size() * ((text.size() + bytes - 1) / bytes));
    tokens.insert(tokens.end(), some.begin(), some.end());
    text.remove_prefix(bytes);
  }
}

/// Converts pieces of text to tokens. Immutable: several threads can use one encoder.
struct PieceEncoder {
  data::TokenizerPtr tokenizer;
  std::vector<std::int64_t> begin, end;  ///< special tokens before and after each document
  std::vector<std::string> files;
  std::string field;  ///< name of the field with the text in JSONL objects

  /// Returns the tokens of a piece of text. Throws Error, with file and line, for a JSONL line that
  /// is not an object with the text field `field`.
  std::vector<std::int64_t> operator()(Piece piece) const {
    const bool begins = piece.begins;
    const bool ends = piece.ends;
    const std::string text = text_of(std::move(piece));
    std::vector<std::int64_t> tokens;
    if (text.empty()) {
      return tokens;
    }
    if (begins) {
      tokens = begin;
    }
    encode_long(*tokenizer, text, tokens);
    if (ends) {
      tokens.insert(tokens.end(), end.begin(), end.end());
    }
    return tokens;
  }

 private:
  std::string text_of(Piece piece) const {
    if (!piece.is_json) {
      return std::move(piece.text);
    }
    const std::string origin = files[piece.place.file] + ":" + std::to_string(piece.place.line);
    data::JsonTexts value = std::move(data::json_text_lists(piece.text, {field}, origin).front());
    TESSERA_CHECK(
        !value.is_list, origin, ": the field \"", field,
        "\" must be a string, but is an array; correct the line, or pass another --field");
    return std::move(value.texts.front());
  }
};

/// Throws tessera::Error if the tokenizer lacks a token that --bos, --eos or --eos-token requires.
PieceEncoder make_encoder(const TokenizeOptions& o, std::vector<std::string> files) {
  PieceEncoder encoder{.tokenizer = data::open_tokenizer(o.tokenizer),
                       .begin = {},
                       .end = {},
                       .files = std::move(files),
                       .field = o.field};
  const data::Tokenizer& tokenizer = *encoder.tokenizer;
  SpecialTokens special;
  // --tokenizer can name a model's folder, whose tokenizer is then used.
  if (const auto config = std::filesystem::path(o.tokenizer) / "config.json";
      std::filesystem::exists(config)) {
    special = read_special_tokens(o.tokenizer, read_config(config));
  }
  if (o.bos) {
    encoder.begin = tokenizer.begin_tokens();
    if (encoder.begin.empty()) {
      encoder.begin = special.begin;
    }
    TESSERA_CHECK(!encoder.begin.empty(), "--bos: '", o.tokenizer,
                  "' defines no begin token; leave --bos out");
  }
  if (o.eos) {
    encoder.end = o.eos_token.empty() ? document_end(&tokenizer, special)
                                      : std::vector{token_of(o.eos_token, tokenizer)};
    TESSERA_CHECK(!encoder.end.empty(), "'", o.tokenizer,
                  "' defines no end token; pass --eos-token ID, or --no-eos, or the model's folder "
                  "as --tokenizer");
  }
  for (const auto* tokens : {&encoder.begin, &encoder.end}) {
    for (const std::int64_t token : *tokens) {
      TESSERA_CHECK(token < tokenizer.vocabulary(), "the model's begin or end token ", token,
                    " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary(),
                    "; pass the tokenizer of this model");
    }
  }
  return encoder;
}

/// Whether a file name has the form PREFIX_000012.bin. `base` is PREFIX without its folder.
bool is_shard(std::string_view name, const std::string& base) {
  if (!name.starts_with(base + "_") || !name.ends_with(".bin")) {
    return false;
  }
  name.remove_prefix(base.size() + 1);
  name.remove_suffix(4);
  return name.size() == 6 &&
         std::ranges::all_of(name, [](unsigned char c) { return std::isdigit(c) != 0; });
}

/// Writes PREFIX_000000.bin, PREFIX_000001.bin and so on, all with the same number of tokens except
/// the last. A shard's file appears only when the shard is complete. Not thread safe.
class ShardSet {
 public:
  /// Throws Error if a shard with the same prefix already exists, because PREFIX_*.bin would also
  /// match the existing shard.
  ShardSet(std::string prefix, std::int64_t vocabulary, std::int64_t shard_tokens)
      : prefix_(std::move(prefix)), vocabulary_(vocabulary), shard_tokens_(shard_tokens) {
    const std::filesystem::path path(prefix_);
    const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      TESSERA_CHECK(!is_shard(entry.path().filename().string(), path.filename().string()),
                    "--out: '", entry.path().string(),
                    "' already exists; remove the shards of an earlier run, or pass another --out");
    }
    TESSERA_CHECK(!error, "the folder of --out '", prefix_, "' can't be read: ", error.message(),
                  "; create the folder first");
  }

  void append(std::span<const std::int64_t> tokens) {
    while (!tokens.empty()) {
      if (!writer_) {
        writer_ = std::make_unique<data::TokenShardWriter>(
            fmt::format("{}_{:06}.bin", prefix_, shards_), vocabulary_);
      }
      const auto room = static_cast<std::size_t>(shard_tokens_ - writer_->size());
      const std::size_t count = std::min(room, tokens.size());
      writer_->append(tokens.first(count));
      tokens = tokens.subspan(count);
      tokens_ += static_cast<std::int64_t>(count);
      if (writer_->size() == shard_tokens_) {
        end_shard();
      }
    }
  }

  /// Completes the last shard. Throws Error if there were no tokens.
  void finish() {
    TESSERA_CHECK(tokens_ > 0, "the files contain no text; pass files with text");
    if (writer_) {
      end_shard();
    }
  }

  std::size_t shards() const { return shards_; }
  std::int64_t tokens() const { return tokens_; }

 private:
  void end_shard() {
    writer_->finish();
    writer_.reset();
    ++shards_;
  }

  std::string prefix_;
  std::int64_t vocabulary_;
  std::int64_t shard_tokens_;
  std::size_t shards_ = 0;
  std::int64_t tokens_ = 0;
  std::unique_ptr<data::TokenShardWriter> writer_;
};

/// With fewer bytes of text than this, starting a thread is not worthwhile.
constexpr std::size_t kChunkBytes = 256 << 10;
/// The maximum number of bytes of text whose tokens are not written yet. The tokens take up to
/// eight times as much memory as the text.
constexpr std::size_t kBytesUnderWay = 16 << 20;

/// A chunk: pieces of text that one thread tokenizes.
struct Chunk {
  std::size_t bytes;
  /// The tokens of the chunk, one list for each piece of text. The future is ready when all pieces
  /// are tokenized.
  std::future<std::vector<std::vector<std::int64_t>>> tokens;
};

class Pipeline {
 public:
  Pipeline(const TokenizeOptions& options, const PieceEncoder& encoder, ShardSet& shards)
      : threads_(static_cast<std::size_t>(options.threads)),
        encoder_(encoder),
        shards_(shards),
        reader_(encoder.files, options.jsonl) {}

  void run() {
    while (std::optional<Piece> piece = reader_.next()) {
      bytes_ += piece->text.size();
      pieces_.push_back(std::move(*piece));
      if (bytes_ >= kChunkBytes) {
        start_chunk();
      }
    }
    start_chunk();
    while (!chunks_.empty()) {
      write_first();
    }
    shards_.finish();
  }

 private:
  void start_chunk() {
    while (!chunks_.empty() &&
           (chunks_.size() >= threads_ || under_way_ + bytes_ > kBytesUnderWay)) {
      write_first();
    }
    under_way_ += bytes_;
    auto encode = [&encoder = encoder_, pieces = std::exchange(pieces_, {})]() mutable {
      // Each piece of text has its own list of tokens, because joining the lists would need memory
      // for a second copy.
      std::vector<std::vector<std::int64_t>> tokens;
      for (Piece& piece : pieces) {
        tokens.push_back(encoder(std::move(piece)));
      }
      return tokens;
    };
    chunks_.push_back(
        {std::exchange(bytes_, 0), std::async(std::launch::async, std::move(encode))});
  }

  void write_first() {
    Chunk chunk = std::move(chunks_.front());
    chunks_.pop_front();
    for (const std::vector<std::int64_t>& tokens : chunk.tokens.get()) {
      shards_.append(tokens);
    }
    under_way_ -= chunk.bytes;
  }

  std::size_t threads_;
  const PieceEncoder& encoder_;
  ShardSet& shards_;
  DocumentReader reader_;
  std::vector<Piece> pieces_;  ///< pieces of text that are not in a chunk yet
  std::size_t bytes_ = 0;
  std::size_t under_way_ = 0;
  std::deque<Chunk> chunks_;
};

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

int tokenize(std::vector<std::string> arguments) {
  const TokenizeOptions options = parse_tokenize_options(std::move(arguments));
  const PieceEncoder encoder = make_encoder(options, list_files("FILES", options.files));
  ShardSet shards(options.out, encoder.tokenizer->vocabulary(), options.shard_tokens);
  Pipeline(options, encoder, shards).run();
  const auto files = static_cast<std::int64_t>(encoder.files.size());
  std::cout << fmt::format("{}: {} in {} of {}\n", options.out, counted(shards.tokens(), "token"),
                           counted(static_cast<std::int64_t>(shards.shards()), "shard"),
                           counted(files, "file"));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("llama_tokenize", argc, argv, tokenize);
}

// llama_tokenize: converts text to token shards. One thread reads and writes; other threads
// tokenize several pieces at a time. Tokens are written in the order of the pieces, so shards do
// not depend on the number of threads. Memory is limited by kBytesUnderWay.

#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <iostream>
#include <limits>
#include <utility>

#include "examples/llama/cli.h"
#include "examples/llama/start.h"
#include "examples/llama/texts/texts.h"
#include "examples/llama/tokenize/shards.h"
#include "examples/llama/tokenize/tokenize_options.h"
#include "tessera/core/error.h"

namespace {

using namespace tessera;
using namespace llama;
using Clock = std::chrono::steady_clock;

/// The minimum amount of text that is worth starting a thread.
constexpr std::size_t kChunkBytes = 256 << 10;
/// The maximum amount of text that is read but not yet written; the tokens of this text take up to
/// eight times as much memory.
constexpr std::size_t kBytesUnderWay = 16 << 20;
constexpr std::chrono::seconds kProgressEvery{5};

/// Prints progress lines to stderr, a few per minute.
class Progress {
 public:
  explicit Progress(const std::vector<std::string>& files) {
    for (const std::string& file : files) {
      std::error_code error;  // an error is ignored here: the reader reports it
      const std::uint64_t bytes = std::filesystem::file_size(file, error);
      total_ += error ? 0 : bytes;
    }
  }

  void update(const DocumentReader& reader, const ShardSet& shards) {
    const Clock::time_point now = Clock::now();
    if (now - shown_ < kProgressEvery) {
      return;
    }
    shown_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    std::cerr << fmt::format(
                     "llama_tokenize: {:.1f}% of {} bytes, {} tokens, {} shards, {:.1f} MB/s\n",
                     100.0 * static_cast<double>(reader.consumed()) /
                         static_cast<double>(std::max<std::uint64_t>(total_, 1)),
                     total_, shards.tokens(), shards.shards(),
                     static_cast<double>(reader.consumed()) / 1e6 / seconds)
              << std::flush;
  }

 private:
  std::uint64_t total_ = 0;
  Clock::time_point start_ = Clock::now(), shown_ = start_;
};

/// Pieces of text that are tokenized together, and the future of their tokens.
struct Chunk {
  std::size_t bytes;
  /// The tokens of each piece of the chunk.
  std::future<std::vector<std::vector<std::int64_t>>> tokens;
};

class Pipeline {
 public:
  Pipeline(const TokenizeOptions& options, const PieceEncoder& encoder, ShardSet& shards)
      : threads_(static_cast<std::size_t>(options.threads)),
        encoder_(encoder),
        shards_(shards),
        reader_(encoder.files, options.jsonl),
        progress_(encoder.files) {}

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
      // The tokens of the pieces are not joined, because the tokens of a long line would then be in
      // memory twice.
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
    progress_.update(reader_, shards_);
  }

  std::size_t threads_;
  const PieceEncoder& encoder_;
  ShardSet& shards_;
  DocumentReader reader_;
  Progress progress_;
  std::vector<Piece> pieces_;  ///< pieces of text for the next chunk
  std::size_t bytes_ = 0;      ///< bytes of pieces_
  std::size_t under_way_ = 0;  ///< bytes of chunks_
  std::deque<Chunk> chunks_;
};

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

int tokenize(std::vector<std::string> arguments) {
  const TokenizeOptions options = parse_tokenize_options(std::move(arguments));
  const PieceEncoder encoder = make_encoder(options, list_files("FILES", options.files));
  const bool narrow = encoder.tokenizer->vocabulary() <=
                      std::int64_t{std::numeric_limits<std::uint16_t>::max()} + 1;
  ShardSet shards(options.out, narrow ? data::TokenWidth::kUint16 : data::TokenWidth::kUint32,
                  options.shard_tokens);
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

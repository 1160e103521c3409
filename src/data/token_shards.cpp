// Token shards in the format that llm.c's tools and data sets use: a header, then tokens of 16 or
// 32 bits. Several shards form one sequence of tokens.
#include "tessera/data/token_shards.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// The header of an llm.c token shard has 256 int32 values. The first three values are used.
using ShardHeader = std::array<std::int32_t, 256>;
constexpr std::size_t kShardHeaderBytes = sizeof(ShardHeader);

struct ShardKind {
  std::int32_t magic;
  std::int32_t version;  ///< version number that llm.c writes in the header
  std::size_t token_bytes;
};
constexpr ShardKind kUint16Shard{20240520, 1, sizeof(std::uint16_t)};
constexpr ShardKind kUint32Shard{20240801, 7, sizeof(std::uint32_t)};

static_assert(std::endian::native == std::endian::little, "token shards are little endian");

/// Determines the token size from the magic number in the header. Accepts version 1 for uint32
/// tokens, because versions 1 and 7 have the same token format.
const ShardKind& kind_of(const ShardHeader& header, const std::string& path) {
  for (const ShardKind* kind : {&kUint16Shard, &kUint32Shard}) {
    if (header[0] != kind->magic) {
      continue;
    }
    TESSERA_CHECK(header[1] == kind->version || header[1] == 1, "token shard '", path,
                  "' has version ", header[1], ", expected ", kind->version,
                  "; write the shard again with llm.c's tools");
    return *kind;
  }
  fail("'", path, "' is not an llm.c token shard: the file's magic number is ", header[0],
       ", expected ", kUint16Shard.magic, " (uint16) or ", kUint32Shard.magic,
       " (uint32); pass token shards, or tokenize the text first (llama_train --text does)");
}

/// A file of tokens. The file is open only during a read, because a data set can have more shards
/// than a process can open files.
class Shard {
 public:
  explicit Shard(const std::string& path) : path_(path) {
    const files::InputFile file = open();
    const std::uint64_t bytes = file.size();
    TESSERA_CHECK(bytes >= kShardHeaderBytes, "token shard '", path, "' has ", bytes,
                  " bytes, too few for the header of ", kShardHeaderBytes,
                  " bytes; the file is truncated: copy or write the file again");
    ShardHeader header;
    file.read_at(0, std::as_writable_bytes(std::span(header)));
    token_bytes_ = kind_of(header, path).token_bytes;
    TESSERA_CHECK(header[2] >= 0, "token shard '", path, "' has a header with ", header[2],
                  " tokens; write the shard again");
    size_ = header[2];
    // The check of the file size detects an incomplete copy before training begins.
    const auto expected = kShardHeaderBytes + static_cast<std::size_t>(size_) * token_bytes_;
    TESSERA_CHECK(bytes == expected, "token shard '", path, "' has a header with ", size_,
                  " tokens (", expected, " bytes with the header), but the file has ", bytes,
                  " bytes; the file is ", bytes < expected ? "truncated" : "damaged",
                  ": copy or write the file again");
  }

  std::int64_t size() const { return size_; }

  void read(std::int64_t begin, std::span<std::int64_t> out) const {
    token_bytes_ == sizeof(std::uint16_t) ? widen<std::uint16_t>(begin, out)
                                          : widen<std::uint32_t>(begin, out);
  }

 private:
  files::InputFile open() const { return {path_, "a token shard"}; }

  template <class Token>
  void widen(std::int64_t begin, std::span<std::int64_t> out) const {
    std::vector<Token> tokens(out.size());
    open().read_at(kShardHeaderBytes + static_cast<std::uint64_t>(begin) * sizeof(Token),
                   std::as_writable_bytes(std::span(tokens)));
    std::ranges::copy(tokens, out.begin());
  }

  std::string path_;
  std::size_t token_bytes_ = 0;
  std::int64_t size_ = 0;
};

/// Throws Error unless the positions [begin, begin + count) are tokens of the file. The check does
/// not compute begin + count, which could overflow.
void check_range(const TokenSource& tokens, std::int64_t begin, std::int64_t count) {
  TESSERA_CHECK(begin >= 0 && begin <= tokens.size() && count <= tokens.size() - begin, "tokens [",
                begin, ", ", begin + count, ") were passed, but the data have ", tokens.size(),
                " tokens; pass a range inside the data");
}

/// The tokens of several shards as one sequence. Immutable, so several threads can read at once.
class ShardedTokens final : public TokenSource {
 public:
  explicit ShardedTokens(const std::vector<std::string>& paths) {
    for (const auto& path : paths) {
      shards_.emplace_back(path);
      ends_.push_back(size() + shards_.back().size());
    }
  }

  std::int64_t size() const override { return ends_.empty() ? 0 : ends_.back(); }

  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    check_range(*this, begin, static_cast<std::int64_t>(out.size()));
    // Finds the first shard that ends after position `begin`; empty shards are skipped.
    auto shard = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                          ends_.begin());
    for (; !out.empty(); ++shard) {
      const auto count = std::min(out.size(), static_cast<std::size_t>(ends_[shard] - begin));
      shards_[shard].read(begin - (ends_[shard] - shards_[shard].size()), out.first(count));
      begin += static_cast<std::int64_t>(count);
      out = out.subspan(count);
    }
  }

 private:
  std::vector<Shard> shards_;
  std::vector<std::int64_t> ends_;  ///< for each shard, the position after the shard's last token
};

/// Converts tokens to the shard's integer type. `before`: number of earlier tokens, for messages.
template <class Token>
std::vector<Token> narrow(std::span<const std::int64_t> tokens, std::int64_t before) {
  std::vector<Token> result;
  result.reserve(tokens.size());
  for (const std::int64_t token : tokens) {
    TESSERA_CHECK(token >= 0 && token <= std::numeric_limits<Token>::max(), "token ", token,
                  " at position ", before + static_cast<std::int64_t>(result.size()),
                  " does not fit into ", 8 * sizeof(Token),
                  " bits; pass the size of the vocabulary to TokenShardWriter");
    result.push_back(static_cast<Token>(token));
  }
  return result;
}

}  // namespace

TokenSourcePtr open_token_shards(const std::vector<std::string>& files) {
  return std::make_shared<ShardedTokens>(files);
}

TokenShardWriter::TokenShardWriter(const std::filesystem::path& path, std::int64_t vocabulary)
    : file_(std::make_unique<files::AtomicFile>(path)),
      wide_(vocabulary > std::int64_t{std::numeric_limits<std::uint16_t>::max()} + 1) {}

TokenShardWriter::~TokenShardWriter() = default;

/// A shard has a maximum number of tokens, because its header stores the number in an int32.
void TokenShardWriter::append(std::span<const std::int64_t> tokens) {
  const auto all = static_cast<std::int64_t>(tokens.size()) + size_;
  TESSERA_CHECK(all <= std::numeric_limits<std::int32_t>::max(), all,
                " tokens are too many for one shard; write several shards, each with at most ",
                std::numeric_limits<std::int32_t>::max());
  const auto write = [&]<class Token>(std::vector<Token> narrowed) {
    file_->write_at(kShardHeaderBytes + static_cast<std::uint64_t>(size_) * sizeof(Token),
                    std::as_bytes(std::span(narrowed)));
  };
  wide_ ? write(narrow<std::uint32_t>(tokens, size_)) : write(narrow<std::uint16_t>(tokens, size_));
  size_ = all;
}

void TokenShardWriter::finish() {
  const ShardKind& kind = wide_ ? kUint32Shard : kUint16Shard;
  ShardHeader header{};
  header[0] = kind.magic;
  header[1] = kind.version;
  header[2] = static_cast<std::int32_t>(size_);
  file_->write_at(0, std::as_bytes(std::span(header)));
  file_->sync();
  file_->publish();
}

namespace {

template <class Token>
class MemoryTokens final : public TokenSource {
 public:
  explicit MemoryTokens(const std::vector<std::int64_t>& tokens)
      : tokens_(tokens.begin(), tokens.end()) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }

  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    check_range(*this, begin, static_cast<std::int64_t>(out.size()));
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
  }

 private:
  std::vector<Token> tokens_;
};

}  // namespace

/// Stores tokens in the smallest type that fits all ids: int64 would need eight times the memory
/// for a text of bytes.
TokenSourcePtr make_token_source(const std::vector<std::int64_t>& tokens) {
  const auto fit = [range = std::ranges::minmax_element(tokens), &tokens](std::int64_t limit) {
    return tokens.empty() || (*range.min >= 0 && *range.max <= limit);
  };
  if (fit(std::numeric_limits<std::uint8_t>::max())) {
    return std::make_shared<MemoryTokens<std::uint8_t>>(tokens);
  }
  if (fit(std::numeric_limits<std::uint16_t>::max())) {
    return std::make_shared<MemoryTokens<std::uint16_t>>(tokens);
  }
  if (fit(std::numeric_limits<std::uint32_t>::max())) {
    return std::make_shared<MemoryTokens<std::uint32_t>>(tokens);
  }
  return std::make_shared<MemoryTokens<std::int64_t>>(tokens);
}

}  // namespace tessera::data

#include "tessera/data/token_shards.h"

#include <glob.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "mapped_file.h"
#include "shard_format.h"
#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// Files matching `pattern`, in byte order, so that every machine sees the same order.
std::vector<std::string> matching_files(const std::string& pattern) {
  glob_t found{};
  const int status = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  TESSERA_CHECK(status == 0 || status == GLOB_NOMATCH, "cannot list the files of '", pattern,
                "': check the folder's permissions");
  TESSERA_CHECK(!paths.empty(), "no token shard matches '", pattern,
                "': give the path of llm.c token shards (and quote the pattern in the shell)");
  std::sort(paths.begin(), paths.end());
  return paths;
}

const ShardKind& kind_of(const ShardHeader& header, const std::string& path) {
  for (const ShardKind* kind : {&kUint16Shard, &kUint32Shard}) {
    if (header[0] != kind->magic) continue;
    TESSERA_CHECK(header[1] == kind->version || header[1] == 1, "token shard '", path,
                  "' has version ", header[1], ", expected ", kind->version,
                  ": write it again with llm.c's tools");
    return *kind;
  }
  fail("'", path, "' is not an llm.c token shard: its magic is ", header[0], ", expected ",
       kUint16Shard.magic, " (uint16) or ", kUint32Shard.magic,
       " (uint32): give token shards, or --text for a text file");
}

/// One shard: its mapping and how to read a token.
class Shard {
 public:
  explicit Shard(const std::string& path) : file_(path) {
    const auto bytes = file_.bytes();
    TESSERA_CHECK(bytes.size() >= kShardHeaderBytes, "token shard '", path, "' has ", bytes.size(),
                  " bytes, too few for its header of ", kShardHeaderBytes,
                  ": it is truncated, copy or write it again");
    ShardHeader header;
    std::memcpy(header.data(), bytes.data(), kShardHeaderBytes);
    token_bytes_ = kind_of(header, path).token_bytes;
    TESSERA_CHECK(header[2] >= 0, "token shard '", path, "' says that it holds ", header[2],
                  " tokens: write it again");
    size_ = header[2];
    const auto expected = kShardHeaderBytes + static_cast<std::size_t>(size_) * token_bytes_;
    TESSERA_CHECK(bytes.size() == expected, "token shard '", path, "' says that it holds ", size_,
                  " tokens (", expected, " bytes with the header) but has ", bytes.size(),
                  " bytes: it is ", bytes.size() < expected ? "truncated" : "damaged",
                  ", copy or write it again");
  }

  std::int64_t size() const { return size_; }

  void read(std::int64_t begin, std::span<std::int64_t> out) const {
    if (token_bytes_ == sizeof(std::uint16_t)) {
      widen<std::uint16_t>(begin, out);
    } else {
      widen<std::uint32_t>(begin, out);
    }
  }

 private:
  template <class Token>
  void widen(std::int64_t begin, std::span<std::int64_t> out) const {
    // The header keeps tokens aligned: 1024 bytes from the start of a page.
    const auto* tokens = reinterpret_cast<const Token*>(file_.bytes().data() + kShardHeaderBytes);
    std::copy_n(tokens + begin, out.size(), out.begin());
  }

  MappedFile file_;
  std::size_t token_bytes_ = 0;
  std::int64_t size_ = 0;
};

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
    check_range(begin, static_cast<std::int64_t>(out.size()));
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
  std::vector<std::int64_t> ends_;  ///< position after each shard's last token
};

}  // namespace

TokenSourcePtr open_token_shards(const std::string& glob) {
  return std::make_shared<ShardedTokens>(matching_files(glob));
}

}  // namespace tessera::data

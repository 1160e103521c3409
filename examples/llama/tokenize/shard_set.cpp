#include "examples/llama/tokenize/shard_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <numeric>
#include <string_view>
#include <system_error>
#include <utility>

#include "examples/llama/fingerprints.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tessera/data/text.h"

namespace llama {

using namespace tessera;
using Json = nlohmann::json;

namespace {

constexpr std::uint64_t kMaxManifestBytes = 1 << 30;
constexpr std::uint64_t kHeaderBytes = 1024;

/// The number in PREFIX_000012.bin; -1 for other names. `base`: PREFIX without its folder.
std::int64_t shard_number(std::string_view name, const std::string& base) {
  if (!name.starts_with(base + "_") || !name.ends_with(".bin")) {
    return -1;
  }
  name.remove_prefix(base.size() + 1);
  name.remove_suffix(4);
  const bool digits =
      std::ranges::all_of(name, [](unsigned char c) { return std::isdigit(c) != 0; });
  return name.size() == 6 && digits ? std::stoll(std::string(name)) : -1;
}

/// The first difference between what two runs make shards of.
std::string change(const Json& saved, const Json& now) {
  for (const auto& [key, value] : now.items()) {
    const Json before = saved.value(key, Json());
    if (key == "files") {
      if (std::string files = files_change(before, value); !files.empty()) {
        return files;
      }
    } else if (key == "tokenizer") {
      if (std::string other = tokenizer_change(before, value); !other.empty()) {
        return other;
      }
    } else if (before != value) {
      return fmt::format("\"{}\" is {} instead of {}", key, value.dump(), before.dump());
    }
  }
  return "";
}

}  // namespace

ShardSet::ShardSet(std::string prefix, Json description, data::TokenWidth width,
                   std::int64_t shard_tokens)
    : prefix_(std::move(prefix)),
      description_(std::move(description)),
      width_(width),
      shard_tokens_(shard_tokens) {
  if (std::filesystem::exists(manifest())) {
    resume(tessera::files::read_file(manifest(), "a file of llama_tokenize", kMaxManifestBytes));
  }
  check_shards();
}

std::string ShardSet::path(std::size_t shard) const {
  return fmt::format("{}_{:06}.bin", prefix_, shard);
}

void ShardSet::resume(const std::string& text) {
  Json saved;
  try {
    saved = Json::parse(text);
    const std::string difference = change(saved.at("made_of"), description_);
    TESSERA_CHECK(difference.empty(), "'", manifest(), "' is of other shards: ", difference,
                  "; give the same, or another --out");
    shards_ = saved.at("shard_tokens").get<std::vector<std::int64_t>>();
    files_ = saved.at("shards");
    TESSERA_CHECK(files_.size() == shards_.size(), "'", manifest(), "' has ", shards_.size(),
                  " shards, but checksums of ", files_.size(), "; give another --out");
    const Json& next = saved.at("next");
    next_ = {.file = next.at("file"), .offset = next.at("offset"), .line = next.at("line")};
    skip_ = taken_ = next.at("tokens_taken");
    complete_ = saved.at("complete");
  } catch (const Json::exception&) {
    fail("'", manifest(), "' is not a file that this llama_tokenize wrote; give another --out");
  }
}

/// A shard that nothing knows of would be read with the others by PREFIX_*.bin. One more than is
/// known may be there: a run may end between a shard and its entry.
void ShardSet::check_shards() const {
  const std::uint64_t token_bytes = width_ == data::TokenWidth::kUint16 ? 2 : 4;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    std::error_code missing;
    const std::uintmax_t bytes = std::filesystem::file_size(path(i), missing);
    const auto expected = kHeaderBytes + static_cast<std::uint64_t>(shards_[i]) * token_bytes;
    TESSERA_CHECK(!missing && bytes == expected, "'", manifest(), "' has the shard '", path(i),
                  "' of ", expected, " bytes, but ",
                  missing ? "there is none" : "it has " + std::to_string(bytes),
                  "; remove all of them to begin anew");
    const std::string other = file_change(files_.at(i), to_json(data::fingerprint(path(i))));
    TESSERA_CHECK(other.empty(), "'", manifest(), "' has the shard '", path(i), "', but ", other,
                  "; remove all of them to begin anew");
  }
  const std::filesystem::path prefix(prefix_);
  const auto folder = prefix.has_parent_path() ? prefix.parent_path() : std::filesystem::path(".");
  std::error_code error;
  const bool begun = std::filesystem::exists(manifest());
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::int64_t number =
        shard_number(entry.path().filename().string(), prefix.filename().string());
    const auto known = static_cast<std::int64_t>(shards_.size()) + (begun && !complete_ ? 1 : 0);
    TESSERA_CHECK(number < known, "'", entry.path().string(),
                  "' is a shard of something else; remove it, or give another --out");
  }
  TESSERA_CHECK(!error, "the folder of --out '", prefix_, "' can't be read: ", error.message(),
                "; make it first");
}

void ShardSet::append(const PiecePlace& place, std::span<const std::int64_t> tokens) {
  auto done = static_cast<std::size_t>(std::exchange(skip_, 0));
  TESSERA_CHECK(done <= tokens.size(), "the files are not those that '", manifest(),
                "' was written of; remove it and its shards to begin anew");
  while (done < tokens.size()) {
    if (!writer_) {
      writer_ = std::make_unique<data::TokenShardWriter>(path(shards_.size()), width_);
    }
    const auto room = static_cast<std::size_t>(shard_tokens_ - writer_->size());
    const std::size_t count = std::min(room, tokens.size() - done);
    writer_->append(tokens.subspan(done, count));
    done += count;
    next_ = place;
    taken_ = static_cast<std::int64_t>(done);
    if (writer_->size() == shard_tokens_) {
      end_shard();
    }
  }
}

/// The first shard comes behind a manifest that knows of none, so that a run that ends between the
/// two can go on.
void ShardSet::end_shard() {
  if (shards_.empty()) {
    const PiecePlace next = std::exchange(next_, {});
    const std::int64_t taken = std::exchange(taken_, 0);
    write_manifest();
    next_ = next;
    taken_ = taken;
  }
  const std::int64_t tokens = writer_->size();
  writer_->finish();
  writer_.reset();
  files_.push_back(to_json(data::fingerprint(path(shards_.size()))));
  shards_.push_back(tokens);
  write_manifest();
}

void ShardSet::finish() {
  TESSERA_CHECK(writer_ || !shards_.empty(), "the files hold no token; give files with text");
  if (writer_) {
    end_shard();
  }
  complete_ = true;
  // A process of another host, where locks don't reach, may have written the same set.
  check_shards();
  write_manifest();
}

std::int64_t ShardSet::tokens() const {
  return std::accumulate(shards_.begin(), shards_.end(), std::int64_t{0}) +
         (writer_ ? writer_->size() : 0);
}

void ShardSet::write_manifest() const {
  const Json json = {{"made_of", description_},
                     {"shard_tokens", shards_},
                     {"shards", files_},
                     {"next",
                      {{"file", next_.file},
                       {"offset", next_.offset},
                       {"line", next_.line},
                       {"tokens_taken", taken_}}},
                     {"complete", complete_}};
  tessera::files::write_file(manifest(), json.dump(1) + "\n");
}

}  // namespace llama

// The output of llama_tokenize.

#include "examples/llama/tokenize/shards.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string_view>
#include <system_error>
#include <utility>

#include "examples/llama/start.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

/// A number is an id, anything else the text of one token.
std::int64_t token_of(const std::string& text, const tessera::data::Tokenizer& tokenizer) {
  const bool is_id = text.find_first_not_of("0123456789") == std::string::npos && text.size() < 10;
  const std::vector<std::int64_t> ids =
      is_id ? std::vector<std::int64_t>{std::stoll(text)} : tokenizer.encode(text);
  TESSERA_CHECK(ids.size() == 1, "--eos-token \"", text, "\" is ", ids.size(),
                " tokens of the tokenizer; name one, by its id or its text");
  TESSERA_CHECK(ids[0] < tokenizer.vocabulary(), "--eos-token ", ids[0],
                " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary());
  return ids[0];
}

/// Cut as a text file is, so that no more memory is needed for it.
void encode_long(const tessera::data::Tokenizer& tokenizer, std::string_view text,
                 std::vector<std::int64_t>& tokens) {
  while (!text.empty()) {
    const std::size_t bytes =
        text.size() > kPieceBytes ? cut_of(text.substr(0, kPieceBytes + 1)) : text.size();
    const std::vector<std::int64_t> some = tokenizer.encode(text.substr(0, bytes));
    // As many of each piece: a vector that doubles would take three times as much.
    tokens.reserve(tokens.size() + some.size() * ((text.size() + bytes - 1) / bytes));
    tokens.insert(tokens.end(), some.begin(), some.end());
    text.remove_prefix(bytes);
  }
}

}  // namespace

PieceEncoder make_encoder(const TokenizeOptions& o, std::vector<std::string> files) {
  PieceEncoder encoder{.tokenizer = tessera::data::open_tokenizer(o.tokenizer),
                       .begin = {},
                       .end = {},
                       .files = std::move(files),
                       .field = o.field};
  const tessera::data::Tokenizer& tokenizer = *encoder.tokenizer;
  const bool is_folder = std::filesystem::is_directory(o.tokenizer);
  const SpecialTokens special = special_tokens_of(is_folder ? o.tokenizer : "");
  if (o.bos) {
    encoder.begin = tokenizer.begin_tokens();
    if (encoder.begin.empty()) {
      encoder.begin = special.begin;
    }
    TESSERA_CHECK(!encoder.begin.empty(), "--bos: '", o.tokenizer,
                  "' names no token that begins a text; leave --bos out");
  }
  if (o.eos) {
    encoder.end = o.eos_token.empty() ? document_end(&tokenizer, special)
                                      : std::vector{token_of(o.eos_token, tokenizer)};
    TESSERA_CHECK(!encoder.end.empty(), "'", o.tokenizer,
                  "' names no token that ends a document; pass --eos-token, --no-eos, or as "
                  "--tokenizer the folder of the model");
  }
  for (const auto* tokens : {&encoder.begin, &encoder.end}) {
    for (const std::int64_t token : *tokens) {
      TESSERA_CHECK(token < tokenizer.vocabulary(), "the model's token ", token,
                    " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary(),
                    "; pass the tokenizer of this model");
    }
  }
  return encoder;
}

nlohmann::json describe(const TokenizeOptions& o, const PieceEncoder& encoder) {
  // One by itself and none as null, as before there could be several.
  const auto all = [](const std::vector<std::int64_t>& ids) {
    if (ids.size() > 1) {
      return nlohmann::json(ids);
    }
    return ids.empty() ? nlohmann::json() : nlohmann::json(ids.front());
  };
  return {{"files", to_json(tessera::data::fingerprints(encoder.files))},
          {"tokenizer", tokenizer_fingerprint(o.tokenizer)},
          {"begin_token", all(encoder.begin)},
          {"end_token", all(encoder.end)},
          {"all_jsonl", o.jsonl},
          {"field", o.field},
          {"tokens_a_shard", o.shard_tokens}};
}

/// The piece is freed when its text is known.
std::string PieceEncoder::text_of(Piece piece) const {
  if (!piece.is_json) {
    return std::move(piece.text);
  }
  const std::string origin = files[piece.place.file] + ":" + std::to_string(piece.place.line);
  return std::move(tessera::data::json_texts(piece.text, {field}, origin).front());
}

std::vector<std::int64_t> PieceEncoder::operator()(Piece piece) const {
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
    Json before = saved.at("made_of"), now = description_;
    adapt_older_tokenizer(before, now);
    const std::string difference = first_difference(before, now);
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
    const std::string other = first_difference(files_.at(i), to_json(data::fingerprint(path(i))));
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

namespace {

/// The process that had the lock may have removed the file between our open() and our flock().
bool has_name(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_nlink > 0;
}

}  // namespace

OutputLock::OutputLock(const std::string& prefix) : path_(prefix + ".lock") {
  while (fd_ < 0) {
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    TESSERA_CHECK(fd_ >= 0, "the folder of --out '", prefix, "' can't be written: '", path_,
                  "': ", std::strerror(errno), "; make the folder first, or name another");
    const bool is_taken = flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (is_taken || !has_name(fd_)) {
      close(fd_);
      fd_ = -1;
    }
    TESSERA_CHECK(!is_taken, "--out '", prefix,
                  "' is being written by another llama_tokenize; wait for it, or give another");
  }
}

OutputLock::~OutputLock() {
  unlink(path_.c_str());
  close(fd_);
}

}  // namespace llama

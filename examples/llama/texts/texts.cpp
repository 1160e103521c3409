// Reads text files, compressed text files and JSON lines.

#include "examples/llama/texts/texts.h"

#include <glob.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace llama {
namespace {

using tessera::files::InputFile;

constexpr std::size_t kInputBytes = 256 << 10;
constexpr std::array<unsigned char, 4> kZstdMagic{0x28, 0xb5, 0x2f, 0xfd};
/// The end of the magic number of a frame that decoders skip; pzstd begins with such a frame.
constexpr std::array<unsigned char, 3> kSkippedMagic{0x2a, 0x4d, 0x18};

bool is_zstd(const InputFile& file) {
  std::array<unsigned char, kZstdMagic.size()> first{};
  if (file.size() < first.size()) {
    return false;
  }
  file.read_at(0, std::as_writable_bytes(std::span(first)));
  return first == kZstdMagic || ((first[0] & 0xf0) == 0x50 &&
                                 std::equal(first.begin() + 1, first.end(), kSkippedMagic.begin()));
}

[[noreturn]] void fail_damaged(const std::string& path, const char* format, std::uint64_t offset,
                               const std::string& reason) {
  tessera::fail("'", path, "' has damaged ", format, " data at byte ", offset, " (", reason,
                "); copy or create the file again");
}

/// Reads a plain file, or decompresses gzip (RFC 1952). Several gzip members are joined. Other
/// bytes after the last member are ignored, as by the program gzip.
class GzipStream final : public ByteStream {
 public:
  explicit GzipStream(std::string path)
      : path_(std::move(path)), file_(gzopen(path_.c_str(), "rb"), &gzclose) {
    TESSERA_CHECK(file_ != nullptr, "'", path_, "' can't be opened: ", std::strerror(errno));
    gzbuffer(file_.get(), kInputBytes);
  }

  std::size_t read(std::span<char> out) override {
    const int count = gzread(file_.get(), out.data(), static_cast<unsigned>(out.size()));
    int status = Z_OK;
    const std::string reason = gzerror(file_.get(), &status);
    TESSERA_CHECK(status != Z_ERRNO && status != Z_MEM_ERROR, "'", path_,
                  "' can't be read: ", status == Z_ERRNO ? std::strerror(errno) : "memory ran out");
    if (count < 0 || status == Z_BUF_ERROR) {
      fail_damaged(path_, "gzip", static_cast<std::uint64_t>(gzoffset(file_.get())),
                   status == Z_BUF_ERROR ? "the file ends too early" : reason);
    }
    return static_cast<std::size_t>(count);
  }

 private:
  std::string path_;
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> file_;
};

/// Decompresses zstd (RFC 8878). The decoder allocates the window that a frame specifies, up to 2
/// GiB (zstd --long=31).
class ZstdStream final : public ByteStream {
 public:
  explicit ZstdStream(InputFile file)
      : file_(std::move(file)),
        buffer_(kInputBytes),
        state_(ZSTD_createDStream(), ZSTD_freeDStream) {
    TESSERA_CHECK(state_ != nullptr,
                  "zstd can't be started, probably because memory ran out; free some memory");
    constexpr int kLongestWindow = 31;
    ZSTD_DCtx_setParameter(state_.get(), ZSTD_d_windowLogMax, kLongestWindow);
  }

  std::size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos < output.size) {
      // If has_more_ is true, the decoder may return more output without more input.
      if (input_.empty() && !refill() && !has_more_) {
        if (within_frame_) {
          fail_here("the file ends too early");
        }
        break;
      }
      const std::size_t before = output.pos;
      ZSTD_inBuffer input{input_.data(), input_.size(), 0};
      const std::size_t status = ZSTD_decompressStream(state_.get(), &output, &input);
      input_ = input_.subspan(input.pos);
      if (ZSTD_isError(status) != 0) {
        fail_here(ZSTD_getErrorName(status));
      }
      within_frame_ = status != 0;
      has_more_ = within_frame_ && (output.pos == output.size || output.pos > before);
    }
    return output.pos;
  }

 private:
  /// Refills the empty input buffer from the file; returns false at the end of the file.
  bool refill() {
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), file_.size() - offset_));
    input_ = std::span(buffer_).first(count);
    file_.read_at(offset_, std::as_writable_bytes(input_));
    offset_ += count;
    return count > 0;
  }

  [[noreturn]] void fail_here(const std::string& reason) const {
    fail_damaged(file_.path().string(), "zstd", offset_ - input_.size(), reason);
  }

  InputFile file_;
  std::uint64_t offset_ = 0;
  std::vector<unsigned char> buffer_;
  std::span<unsigned char> input_;
  std::unique_ptr<ZSTD_DStream, std::size_t (*)(ZSTD_DStream*)> state_;
  bool within_frame_ = false;
  bool has_more_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> open_stream(const std::string& path) {
  InputFile file(path, "a text, JSONL, gzip or zstd file");
  if (is_zstd(file)) {
    return std::make_unique<ZstdStream>(std::move(file));
  }
  return std::make_unique<GzipStream>(path);
}

namespace {

constexpr std::size_t kReadBytes = 1 << 20;

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

bool is_json_name(std::string_view name) {
  for (const std::string_view compressed : {".gz", ".zst", ".zstd"}) {
    if (name.ends_with(compressed)) {
      name.remove_suffix(compressed.size());
      break;
    }
  }
  return name.ends_with(".jsonl") || name.ends_with(".json") || name.ends_with(".ndjson");
}

}  // namespace

std::size_t cut_of(std::string_view text) {
  std::size_t line_end = 0;
  for (std::size_t i = text.size() - 1; i > 1; --i) {
    if (text[i - 1] != '\n') {
      continue;
    }
    if (!is_space(text[i]) && !is_space(text[i - 2])) {
      return i;
    }
    line_end = std::max(line_end, i);
  }
  if (line_end > 0) {
    return line_end;
  }
  // The text has no line end. The cut is before a UTF-8 character that begins in the last 3 bytes,
  // because this character can be incomplete.
  for (std::size_t i = text.size() - 1; i > 0 && i + 4 > text.size(); --i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) {
      return i;
    }
  }
  return text.size();
}

DocumentReader::DocumentReader(std::vector<std::string> files, bool all_json)
    : files_(std::move(files)), all_json_(all_json) {}

void DocumentReader::open() {
  stream_ = open_stream(files_[place_.file]);
  buffer_.clear();
  begin_ = 0;
  at_end_ = false;
}

/// Reads from the file until the buffer has at least `bytes` bytes that next() has not returned
/// yet. Returns false if the file ends earlier.
bool DocumentReader::fill(std::size_t bytes) {
  while (!at_end_ && left().size() < bytes) {
    // Moves unread bytes to the start of the buffer, before each read from the file.
    buffer_.erase(0, std::exchange(begin_, 0));
    const std::size_t had = buffer_.size();
    buffer_.resize(had + kReadBytes);
    const std::size_t got = stream_->read(std::span(buffer_).subspan(had));
    buffer_.resize(had + got);
    at_end_ = got < kReadBytes;
  }
  return left().size() >= bytes;
}

Piece DocumentReader::take(std::size_t bytes) {
  Piece piece{.place = place_, .text = std::string(left().substr(0, bytes))};
  begin_ += bytes;
  place_.offset += bytes;
  return piece;
}

std::optional<Piece> DocumentReader::next_text() {
  const bool longer = fill(kPieceBytes + 1);
  if (left().empty()) {
    return std::nullopt;
  }
  const bool begins = place_.offset == 0;
  // cut_of() gets only the first kPieceBytes + 1 bytes, so that the cut does not depend on how full
  // the buffer is.
  Piece piece = take(longer ? cut_of(left().substr(0, kPieceBytes + 1)) : left().size());
  piece.begins = begins;
  piece.ends = !longer;
  return piece;
}

/// Returns the length of the next line including its line end; 0 if there is no further line.
std::size_t DocumentReader::find_line() {
  std::size_t searched = 0;
  std::size_t end = left().find('\n');
  while (end == std::string_view::npos && !at_end_) {
    TESSERA_CHECK(left().size() <= kLineBytes, files_[place_.file], ":", place_.line,
                  ": the line has more than ", kLineBytes,
                  " bytes; pass a file with one JSON object per line");
    searched = left().size();
    fill(searched + 1);
    end = left().find('\n', searched);
  }
  return end == std::string_view::npos ? left().size() : end + 1;
}

std::optional<Piece> DocumentReader::next_line() {
  while (const std::size_t bytes = find_line()) {
    Piece piece = take(bytes);
    ++place_.line;
    if (piece.text.find_first_not_of(" \t\r\n") != std::string::npos) {
      piece.is_json = true;
      return piece;
    }
  }
  return std::nullopt;
}

std::optional<Piece> DocumentReader::next() {
  while (place_.file < files_.size()) {
    if (!stream_) {
      open();
    }
    const bool is_json = all_json_ || is_json_name(files_[place_.file]);
    if (std::optional<Piece> piece = is_json ? next_line() : next_text()) {
      return piece;
    }
    stream_.reset();
    place_ = {.file = place_.file + 1};
  }
  return std::nullopt;
}

namespace {

/// Removes repeated files: two of the names and patterns in a flag can match the same file.
std::vector<std::string> without_repeats(const std::vector<std::string>& files) {
  std::vector<std::string> once;
  std::set<std::filesystem::path> seen;
  for (const std::string& file : files) {
    std::error_code error;
    const std::filesystem::path place = std::filesystem::weakly_canonical(file, error);
    // A path that cannot be resolved remains in the list: reading the file later reports the error.
    if (seen.insert(error ? std::filesystem::path(file) : place).second) {
      once.push_back(file);
    }
  }
  return once;
}

}  // namespace

std::vector<std::string> list_files(const std::string& flag,
                                    const std::vector<std::string>& patterns) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    // The name of an existing file is not treated as a pattern, because a file name can contain
    // characters that are special in a pattern.
    std::error_code error;
    if (std::filesystem::exists(pattern, error)) {
      files.push_back(pattern);
      continue;
    }
    glob_t found{};
    const int status = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
    std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    TESSERA_CHECK(status == 0 || status == GLOB_NOMATCH, flag, ": cannot list the files of '",
                  pattern, "'; check the folder's permissions");
    TESSERA_CHECK(!matches.empty(), flag, ": no file matches '", pattern, "'",
                  error ? " (" + error.message() + ")" : "",
                  "; pass existing files in readable folders");
    std::ranges::sort(matches);
    files.insert(files.end(), matches.begin(), matches.end());
  }
  return without_repeats(files);
}

}  // namespace llama

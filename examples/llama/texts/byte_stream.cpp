#include "examples/llama/texts/byte_stream.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace llama {
namespace {

using tessera::files::InputFile;

constexpr std::size_t kInputBytes = 256 << 10;
constexpr std::array<unsigned char, 2> kGzipMagic{0x1f, 0x8b};
constexpr std::array<unsigned char, 4> kZstdMagic{0x28, 0xb5, 0x2f, 0xfd};

template <std::size_t N>
bool begins_with(const InputFile& file, const std::array<unsigned char, N>& magic) {
  std::array<unsigned char, N> first{};
  if (file.size() < N) {
    return false;
  }
  file.read_at(0, std::as_writable_bytes(std::span(first)));
  return first == magic;
}

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(InputFile file) : file_(std::move(file)) {}

  std::size_t read(std::span<char> out) override {
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), file_.size() - offset_));
    file_.read_at(offset_, std::as_writable_bytes(out.first(count)));
    offset_ += count;
    return count;
  }

  void skip(std::uint64_t bytes) override {
    TESSERA_CHECK(bytes <= file_.size() - offset_, "'", file_.path().string(),
                  "' is shorter than it was; tokenize it anew, under another --out");
    offset_ += bytes;
  }

  std::uint64_t consumed() const override { return offset_; }

 private:
  InputFile file_;
  std::uint64_t offset_ = 0;
};

/// What both formats share: a buffer of the file's bytes.
class CompressedStream : public ByteStream {
 public:
  explicit CompressedStream(InputFile file) : file_(std::move(file)), buffer_(kInputBytes) {}

  std::uint64_t consumed() const override { return offset_ - input_.size(); }

 protected:
  /// False at the end of the file.
  bool refill() {
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), file_.size() - offset_));
    input_ = std::span(buffer_).first(count);
    file_.read_at(offset_, std::as_writable_bytes(input_));
    offset_ += count;
    return count > 0;
  }

  [[noreturn]] void fail_here(const char* format, const std::string& reason) const {
    tessera::fail("'", file_.path().string(), "' is damaged ", format, " data, at byte ",
                  consumed(), " (", reason, "); copy or make it again");
  }

  std::span<unsigned char> input_;  ///< the part of buffer_ that is not decompressed yet

 private:
  InputFile file_;
  std::uint64_t offset_ = 0;
  std::vector<unsigned char> buffer_;
};

/// RFC 1952; members one behind the other are one text, as gzip itself reads them.
class GzipStream final : public CompressedStream {
 public:
  explicit GzipStream(InputFile file) : CompressedStream(std::move(file)) {
    // 16: with gzip's header and check sum.
    TESSERA_CHECK(inflateInit2(&state_, MAX_WBITS + 16) == Z_OK,
                  "zlib can't be started: is there memory left?");
  }
  ~GzipStream() override { inflateEnd(&state_); }
  GzipStream(const GzipStream&) = delete;
  GzipStream& operator=(const GzipStream&) = delete;

  std::size_t read(std::span<char> out) override {
    const std::size_t wanted = out.size();
    while (!out.empty()) {
      if (input_.empty() && !refill()) {
        if (within_member_) {
          fail_here("gzip", "it ends too early");
        }
        break;
      }
      if (!within_member_) {
        skip_padding();
      }
      if (!input_.empty()) {
        out = out.subspan(inflate_some(out));
      }
    }
    return wanted - out.size();
  }

 private:
  /// Zeros behind a member, which tapes and disk images add; gzip itself passes over them.
  void skip_padding() {
    const auto member = std::ranges::find_if(input_, [](unsigned char c) { return c != 0; });
    input_ = input_.subspan(static_cast<std::size_t>(member - input_.begin()));
  }

  std::size_t inflate_some(std::span<char> out) {
    within_member_ = true;
    state_.next_in = input_.data();
    state_.avail_in = static_cast<uInt>(input_.size());
    state_.next_out = reinterpret_cast<Bytef*>(out.data());
    const auto room = static_cast<uInt>(std::min<std::size_t>(out.size(), 1U << 30));
    state_.avail_out = room;
    const int status = inflate(&state_, Z_NO_FLUSH);
    input_ = input_.last(state_.avail_in);
    if (status == Z_STREAM_END) {
      within_member_ = false;
      inflateReset(&state_);
    } else if (status != Z_OK) {
      fail_here("gzip", state_.msg != nullptr ? state_.msg : "no progress");
    }
    return room - state_.avail_out;
  }

  z_stream state_{};
  bool within_member_ = false;
};

/// RFC 8878. Its decoder allocates the window that a frame says, of up to 2 GiB (zstd --long=31).
class ZstdStream final : public CompressedStream {
 public:
  explicit ZstdStream(InputFile file)
      : CompressedStream(std::move(file)), state_(ZSTD_createDStream(), ZSTD_freeDStream) {
    TESSERA_CHECK(state_ != nullptr, "zstd can't be started: is there memory left?");
    constexpr int kLongestWindow = 31;
    ZSTD_DCtx_setParameter(state_.get(), ZSTD_d_windowLogMax, kLongestWindow);
  }

  std::size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos < output.size) {
      // A frame may hold back output for which there was no room.
      if (input_.empty() && !refill() && !has_more_) {
        if (within_frame_) {
          fail_here("zstd", "it ends too early");
        }
        break;
      }
      const std::size_t before = output.pos;
      ZSTD_inBuffer input{input_.data(), input_.size(), 0};
      const std::size_t status = ZSTD_decompressStream(state_.get(), &output, &input);
      input_ = input_.subspan(input.pos);
      if (ZSTD_isError(status) != 0) {
        fail_here("zstd", ZSTD_getErrorName(status));
      }
      within_frame_ = status != 0;
      has_more_ = within_frame_ && (output.pos == output.size || output.pos > before);
    }
    return output.pos;
  }

 private:
  std::unique_ptr<ZSTD_DStream, std::size_t (*)(ZSTD_DStream*)> state_;
  bool within_frame_ = false;
  bool has_more_ = false;
};

}  // namespace

void ByteStream::skip(std::uint64_t bytes) {
  std::vector<char> passed(std::min<std::uint64_t>(bytes, 1 << 20));
  while (bytes > 0) {
    const auto wanted = std::min<std::uint64_t>(bytes, passed.size());
    const std::size_t got = read(std::span(passed).first(wanted));
    TESSERA_CHECK(got == wanted,
                  "a file is shorter than it was; tokenize it anew, under another --out");
    bytes -= got;
  }
}

std::unique_ptr<ByteStream> open_stream(const std::string& path) {
  InputFile file(path, "a text, JSONL, gzip or zstd file");
  if (begins_with(file, kGzipMagic)) {
    return std::make_unique<GzipStream>(std::move(file));
  }
  if (begins_with(file, kZstdMagic)) {
    return std::make_unique<ZstdStream>(std::move(file));
  }
  return std::make_unique<PlainStream>(std::move(file));
}

}  // namespace llama

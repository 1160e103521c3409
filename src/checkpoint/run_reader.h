#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace tessera::checkpoint {

/// Reads runs of a file, in rising order, to consecutive places in memory: neighbours together.
/// `ReadBytes` is called as read(file offset, out, count).
template <class ReadBytes>
class RunReader {
 public:
  RunReader(std::byte* out, ReadBytes read) : out_(out), read_(std::move(read)) {}

  void add(std::uint64_t offset, std::uint64_t count) {
    const bool near = !runs_.empty() && offset - end_ <= kMaxGap &&
                      offset + count - runs_.front().offset <= kMaxSpan;
    if (!near) flush();
    runs_.push_back({offset, count});
    end_ = offset + count;
  }

  void flush() {
    if (runs_.size() == 1) read_(end_ - runs_[0].count, out_, runs_[0].count);
    if (runs_.size() > 1) read_together();
    for (const auto& run : runs_) out_ += run.count;
    runs_.clear();
  }

 private:
  /// Runs closer than this are read together: a page is read from the disk as a whole anyway.
  static constexpr std::uint64_t kMaxGap = 4096;
  static constexpr std::uint64_t kMaxSpan = 1 << 20;

  struct Run {
    std::uint64_t offset;
    std::uint64_t count;
  };

  void read_together() {
    const auto begin = runs_.front().offset;
    buffer_.resize(end_ - begin);
    read_(begin, buffer_.data(), buffer_.size());
    auto* out = out_;
    for (const auto& run : runs_) {
      std::memcpy(out, buffer_.data() + (run.offset - begin), run.count);
      out += run.count;
    }
  }

  std::byte* out_;
  ReadBytes read_;
  std::uint64_t end_ = 0;
  std::vector<Run> runs_;
  std::vector<std::byte> buffer_;
};

}  // namespace tessera::checkpoint

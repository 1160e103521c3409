#pragma once

#include <string>
#include <string_view>

namespace tessera::run {

/// Writes to one of the launcher's own outputs without ever blocking on it: a reader that stalls
/// must not keep the launcher from seeing a rank die. (The descriptor itself stays blocking,
/// because rank 0 shares it.)
class OutputSink {
 public:
  explicit OutputSink(int fd) : fd_(fd) {}

  void add(std::string_view text) { pending_ += text; }
  bool pending() const { return !pending_.empty(); }
  /// True when so much waits that the ranks should be read no further.
  bool full() const { return pending_.size() > kFull; }
  int fd() const { return fd_; }

  /// Writes what fits now.
  void flush();

 private:
  static constexpr std::size_t kFull = 1 << 20;
  bool write_some();
  std::size_t next_size() const;

  int fd_;
  std::string pending_;
};

}  // namespace tessera::run

// Files as their contents, compressed or not.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace llama {

/// The contents of a file from the first byte to the last. One thread at a time.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  /// Fills `out` and returns its size, or less at the end. Throws Error for damaged data, with the
  /// place in the file.
  virtual std::size_t read(std::span<char> out) = 0;
  /// Passes over so many bytes. Throws Error if there are fewer.
  virtual void skip(std::uint64_t bytes);
  /// How many bytes of the file itself have been read.
  virtual std::uint64_t consumed() const = 0;
};

/// The contents of a regular file, decompressed if its first bytes say gzip or zstd. Throws Error
/// if it can't be opened.
std::unique_ptr<ByteStream> open_stream(const std::string& path);

}  // namespace llama

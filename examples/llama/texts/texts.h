// Files of text, which may be compressed: bytes, documents, JSON lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

/// Reads the contents of a file in order. Not thread safe.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  /// Fills `out` and returns its size, or less at the end. Throws Error for damaged data, with the
  /// place in the file.
  virtual std::size_t read(std::span<char> out) = 0;
  /// The number of bytes of the file that were read.
  virtual std::uint64_t consumed() const = 0;
};

/// The contents of a regular file, decompressed if its first bytes say gzip or zstd. Throws Error
/// if it can't be opened.
std::unique_ptr<ByteStream> open_stream(const std::string& path);

/// Where a piece begins.
struct PiecePlace {
  std::size_t file = 0;      ///< its index
  std::uint64_t offset = 0;  ///< in the contents of the file
  std::uint64_t line = 1;    ///< line number in a JSONL file
};

/// A document, or a part of a long text file. Pieces are tokenized alone.
struct Piece {
  PiecePlace place;
  std::string text;  ///< a whole line of a JSONL file
  bool is_json = false;
  bool begins = true, ends = true;  ///< a document begins, or ends, with this piece
};

/// A text file of more than this many bytes is cut.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
/// A longer line of a JSONL file is refused.
inline constexpr std::size_t kLineBytes = std::size_t{32} << 20;

/// Where to cut a text that begins with `text`: behind the last line end between two characters
/// that are not white space, since byte-level tokenizers split there anyway; else behind the last
/// line end; else at a character. > 0.
std::size_t cut_of(std::string_view text);

/// Reads files in order. A file is one document; in a JSONL file each line that is not blank is
/// one.
class DocumentReader {
 public:
  /// `all_json`: all files are JSONL, whatever their names.
  DocumentReader(std::vector<std::string> files, bool all_json);
  /// The next piece, never empty; nullopt at the end of the last file. Throws Error for a file that
  /// can't be read and for a line of more than kLineBytes.
  std::optional<Piece> next();
  /// How many of the files' own bytes have been read since the construction.
  std::uint64_t consumed() const;

 private:
  void open();
  std::string_view left() const { return std::string_view(buffer_).substr(begin_); }
  bool fill(std::size_t bytes);
  std::size_t find_line();
  std::optional<Piece> next_text();
  std::optional<Piece> next_line();
  Piece take(std::size_t bytes);

  std::vector<std::string> files_;
  bool all_json_;
  PiecePlace place_;
  std::unique_ptr<ByteStream> stream_;
  std::string buffer_;          ///< contents, as far as they have been read
  std::size_t begin_ = 0;       ///< where the rest to be taken begins: at place_
  bool at_end_ = false;         ///< the buffer has all that is left of the file
  std::uint64_t consumed_ = 0;  ///< bytes of the files before
};

/// The files of all patterns, those of each in byte order, each file once, at its first place. A
/// pattern that is the name of a file is that file. `flag`: where the patterns were given, for
/// messages. Throws tessera::Error for one without a file.
std::vector<std::string> list_files(const std::string& flag,
                                    const std::vector<std::string>& patterns);

}  // namespace llama

// Text files, which can be compressed: bytes, documents, JSON lines.
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
  /// Fills `out` and returns the number of bytes read. Fewer bytes than the size of `out` mean the
  /// end of the file. Throws Error for damaged data.
  virtual std::size_t read(std::span<char> out) = 0;
};

/// Opens a regular file. The stream decompresses the file if the first bytes of the file identify
/// gzip or zstd. Throws Error if the file can't be opened.
std::unique_ptr<ByteStream> open_stream(const std::string& path);

/// The place in the input files at which a piece of text begins.
struct PiecePlace {
  std::size_t file = 0;      ///< index of the file in the list of input files
  std::uint64_t offset = 0;  ///< offset in the contents of the file, after decompression
  std::uint64_t line = 1;    ///< line number in the file, if the file is JSONL
};

/// A document, or a part of a long text file. Each piece is tokenized separately.
struct Piece {
  PiecePlace place;
  std::string text;  ///< the text of the piece; for a JSONL file, a whole line
  bool is_json = false;
  bool begins = true, ends = true;  ///< whether a document begins or ends with this piece
};

/// The maximum size of a piece: a text file with more bytes is split into pieces.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
/// The maximum size of a line of a JSONL file; a longer line is an error.
inline constexpr std::size_t kLineBytes = std::size_t{32} << 20;

/// Returns the offset (above 0) at which to cut a text that begins with `text`: after the last line
/// end between two non-whitespace characters, where byte-level tokenizers split anyway. Otherwise
/// after the last line end, or between two characters.
std::size_t cut_of(std::string_view text);

/// Reads files in order. A text file is one document; in a JSONL file, each non-blank line is one
/// document.
class DocumentReader {
 public:
  /// `all_json`: whether to treat all files as JSONL, whatever the names of the files.
  DocumentReader(std::vector<std::string> files, bool all_json);
  /// Returns the next non-empty piece of text; nullopt at the end of the last file. Throws Error
  /// for a file that can't be read, and for a JSONL line longer than kLineBytes.
  std::optional<Piece> next();

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
  std::string buffer_;
  std::size_t begin_ = 0;
  bool at_end_ = false;
};

/// Returns the files that match the globs `patterns`: each file once, in the order of the patterns,
/// then in byte order. The name of an existing file matches only this file. `flag`: the flag's name
/// for messages. Throws tessera::Error for a pattern without a match.
std::vector<std::string> list_files(const std::string& flag,
                                    const std::vector<std::string>& patterns);

}  // namespace llama

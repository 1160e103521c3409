#include "examples/llama/texts/document_reader.h"

#include <algorithm>
#include <span>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

constexpr std::size_t kReadBytes = 1 << 20;

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

/// By the name, compressed or not.
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
  // The first byte of a character in UTF-8, if there is one near the end.
  for (std::size_t i = text.size() - 1; i > 0 && i + 4 > text.size(); --i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) {
      return i;
    }
  }
  return text.size();
}

DocumentReader::DocumentReader(std::vector<std::string> files, bool all_json, PiecePlace place)
    : files_(std::move(files)), all_json_(all_json), place_(place) {}

void DocumentReader::open() {
  stream_ = open_stream(files_[place_.file]);
  stream_->skip(place_.offset);
  buffer_.clear();
  begin_ = 0;
  at_end_ = false;
}

/// Reads on until so many bytes are left, or the file ends; whether there are so many.
bool DocumentReader::fill(std::size_t bytes) {
  while (!at_end_ && left().size() < bytes) {
    // Moved once for each reading, not for each piece.
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
  // No more of it is looked at than of a file that is read from here on.
  Piece piece = take(longer ? cut_of(left().substr(0, kPieceBytes + 1)) : left().size());
  piece.begins = begins;
  piece.ends = !longer;
  return piece;
}

/// The bytes of the next line with its end, 0 where there is none.
std::size_t DocumentReader::find_line() {
  std::size_t searched = 0;
  std::size_t end = left().find('\n');
  while (end == std::string_view::npos && !at_end_) {
    TESSERA_CHECK(left().size() <= kLineBytes, files_[place_.file], ":", place_.line,
                  ": the line has more than ", kLineBytes,
                  " bytes; give a file with one JSON object a line");
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
    if (!tessera::data::is_blank(piece.text)) {
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
    consumed_ += stream_->consumed();
    stream_.reset();
    place_ = {.file = place_.file + 1};
  }
  return std::nullopt;
}

std::uint64_t DocumentReader::consumed() const {
  return consumed_ + (stream_ ? stream_->consumed() : 0);
}

}  // namespace llama

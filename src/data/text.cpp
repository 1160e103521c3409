#include "tessera/data/text.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "unicode.h"

namespace tessera::data {

/// Rejects folders, because std::ifstream opens a folder and then fails without an error message.
std::string read_text(const std::string& path) {
  std::error_code error;
  TESSERA_CHECK(!std::filesystem::is_directory(path, error), "'", path,
                "' is a folder; pass a text file");
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  TESSERA_CHECK(in, "cannot read the text file '", path,
                "'; pass a file that exists and is readable");
  detail::refuse_lfs_pointer(path, text);
  return text;
}

namespace {

/// nlohmann's parser keeps its nesting on the heap, so deep nesting cannot overflow the stack.
nlohmann::json parse_line(std::string_view line, const std::string& origin) {
  TESSERA_CHECK(!line.starts_with(detail::kByteOrderMark), origin,
                ": the line begins with a byte order mark; save the file without the mark");
  try {
    return nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& error) {
    fail(origin, ": the line is not JSON (", error.what(), ")", detail::json_hint(error.what()),
         "; write one JSON object per line");
  }
}

}  // namespace

std::vector<JsonTexts> json_text_lists(std::string_view line,
                                       const std::vector<std::string>& fields,
                                       const std::string& origin) {
  const nlohmann::json object = parse_line(line, origin);
  TESSERA_CHECK(object.is_object(), origin,
                ": the line is not a JSON object; write one JSON object per line");
  std::vector<JsonTexts> all;
  for (const std::string& field : fields) {
    const auto found = object.find(field);
    TESSERA_CHECK(found != object.end(), origin, ": the object has no field \"", printable(field),
                  "\"; pass the name of a field of the object");
    JsonTexts& texts = all.emplace_back();
    texts.is_list = found->is_array();
    const auto add = [&](const nlohmann::json& value) {
      TESSERA_CHECK(value.is_string(), origin, ": the field \"", printable(field),
                    "\" must be a string, but is of type ", value.type_name(),
                    "; correct the line, or pass the name of another field");
      texts.texts.push_back(value.get<std::string>());
    };
    if (texts.is_list) {
      std::ranges::for_each(*found, add);
    } else {
      add(*found);
    }
  }
  return all;
}

namespace {

constexpr std::uint64_t kPieces = 64;
constexpr std::uint64_t kPieceBytes = 4096;

/// Returns the offset of block `i` for the fingerprint of a file of `bytes` bytes. The blocks cover
/// a small file, and are spread evenly over a large file.
std::uint64_t piece_offset(std::uint64_t i, std::uint64_t bytes) {
  return bytes <= kPieces * kPieceBytes ? i * kPieceBytes
                                        : i * (bytes - kPieceBytes) / (kPieces - 1);
}

FileFingerprint fingerprint(const std::string& path) {
  const files::InputFile file(path, "a file of training data");
  FileFingerprint result{std::filesystem::path(path).filename().string(), file.size(), 0};
  std::vector<std::byte> piece;
  for (std::uint64_t i = 0; i < kPieces && piece_offset(i, file.size()) < file.size(); ++i) {
    const std::uint64_t offset = piece_offset(i, file.size());
    piece.resize(std::min(kPieceBytes, file.size() - offset));
    file.read_at(offset, piece);
    result.sum = detail::crc32c(piece, result.sum);
  }
  return result;
}

}  // namespace

std::vector<FileFingerprint> fingerprints(const std::vector<std::string>& files) {
  std::vector<FileFingerprint> results;
  std::ranges::transform(files, std::back_inserter(results), fingerprint);
  return results;
}

}  // namespace tessera::data

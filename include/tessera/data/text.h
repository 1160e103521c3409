#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The contents of a file. Throws Error if it cannot be read.
std::string read_text(const std::string& path);

/// The loss of the best bigram model of this text, in nats per byte: the entropy of a byte given
/// the byte before it. 0 for fewer than two bytes.
double bigram_entropy(std::string_view text);

/// The texts of `fields`, in this order, in a line of a JSON Lines file. `origin`: file and line,
/// for messages. Throws Error if the line is not a JSON object, if a field is missing, and if a
/// field is not a text.
std::vector<std::string> json_texts(std::string_view line, const std::vector<std::string>& fields,
                                    const std::string& origin);

/// A field of an object that is a text, or a list of texts.
struct JsonTexts {
  std::vector<std::string> texts;
  bool is_list = false;
};
/// As json_texts(), but a field may be a list of texts as well.
std::vector<JsonTexts> json_text_lists(std::string_view line,
                                       const std::vector<std::string>& fields,
                                       const std::string& origin);

/// Whether a line has only white space.
bool is_blank(std::string_view line);

/// Identifies a file without reading all of it.
struct FileFingerprint {
  std::string name;  ///< without its folder, since data may move
  std::uint64_t bytes = 0;
  /// CRC-32C of up to 64 pieces of 4 KiB, spread evenly from the first byte to the last.
  std::uint32_t sum = 0;
  friend bool operator==(const FileFingerprint&, const FileFingerprint&) = default;
};

/// Throws Error if the file cannot be read.
FileFingerprint fingerprint(const std::string& path);
/// The same of each file, in order.
std::vector<FileFingerprint> fingerprints(const std::vector<std::string>& files);

}  // namespace tessera::data
TESSERA_API_END

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/detail/text_values.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// Returns the contents of a file. Throws Error if the file cannot be read.
std::string read_text(const std::string& path);

/// Returns the values of `fields` in one line of a JSON Lines file. `origin`: file and line, for
/// messages. Throws Error unless the line is a JSON object in which each field is a string or a
/// list of strings.
std::vector<JsonTexts> json_text_lists(std::string_view line,
                                       const std::vector<std::string>& fields,
                                       const std::string& origin);

/// Returns a fingerprint for each of the files, in order. Throws Error if a file cannot be read.
std::vector<FileFingerprint> fingerprints(const std::vector<std::string>& files);

}  // namespace tessera::data
TESSERA_API_END

// Checks of texts from users and files: strict JSON, and a suggestion for a misspelled name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Throws Error unless `text`, from an untrusted file, is a JSON object that every parser reads in
/// the same way. Rejects everything that RFC 8259 forbids, everything that parsers interpret
/// differently (duplicate keys, NUL bytes, a byte order mark), and objects of more than 8 nested
/// levels, 1,000,000 keys or 10,000,000 values.
void check_strict_json(std::string_view text);

/// The first of the candidates with the smallest Levenshtein distance from `word`, for a message
/// about an unknown name. Returns "" if there are no candidates.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END

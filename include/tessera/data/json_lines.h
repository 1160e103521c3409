#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The texts of `fields`, in this order, of a JSON object on a line of a JSON Lines file. `origin`:
/// file and line, for messages. Throws Error if the line is not a JSON object, if it lacks a field,
/// and if a field is not a text.
std::vector<std::string> json_texts(std::string_view line, const std::vector<std::string>& fields,
                                    const std::string& origin);

/// Whether a line has nothing but white space, as a reader of JSON Lines passes over.
bool is_blank(std::string_view line);

}  // namespace tessera::data
TESSERA_API_END

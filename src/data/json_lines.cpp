#include "tessera/data/json_lines.h"

#include <nlohmann/json.hpp>

#include "tessera/core/detail/text_faults.h"
#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// nlohmann's parser keeps its place on the heap: depth costs memory only.
nlohmann::json parse_line(std::string_view line, const std::string& origin) {
  TESSERA_CHECK(!line.starts_with(detail::kByteOrderMark), origin,
                ": the line begins with a byte order mark; save the file without one");
  try {
    return nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& error) {
    fail(origin, ": the line is not JSON (", error.what(), ")", detail::json_hint(error.what()),
         "; give a file with one JSON object a line");
  }
}

}  // namespace

std::vector<std::string> json_texts(std::string_view line, const std::vector<std::string>& fields,
                                    const std::string& origin) {
  nlohmann::json object = parse_line(line, origin);
  TESSERA_CHECK(object.is_object(), origin,
                ": the line is no JSON object; give a file with one JSON object a line");
  std::vector<std::string> texts;
  for (const std::string& field : fields) {
    const auto found = object.find(field);
    TESSERA_CHECK(found != object.end(), origin, ": the object has no field \"", field,
                  "\"; name the one that it has");
    TESSERA_CHECK(found->is_string(), origin, ": the field \"", field,
                  "\" must be a text, but it is of the kind ", found->type_name(),
                  "; correct it, or name another field");
    texts.push_back(std::move(found->get_ref<std::string&>()));
  }
  return texts;
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

}  // namespace tessera::data

#include "pipeline/white_space.h"

#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

bool is_space(char32_t code) {
  return unicode_codes(CodeKind::kStrippedSpace).contains(code);
}

}  // namespace

std::size_t leading_space(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t bytes = first_character(text.substr(at)).bytes;
    if (!is_space(code_point(text.substr(at, bytes)))) {
      break;
    }
    at += bytes;
  }
  return at;
}

std::size_t without_trailing_space(std::string_view text) {
  while (!text.empty() && is_space(code_point(last_character(text)))) {
    text.remove_suffix(last_character(text).size());
  }
  return text.size();
}

}  // namespace tessera::data

#include "pipeline/json_field.h"

#include <algorithm>

namespace tessera::data {
namespace {

using nlohmann::json;

const json kNull;
constexpr std::size_t kMaxShown = 80;

/// As ASCII JSON: untrusted keys and texts may hold anything.
std::string short_text(const json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= kMaxShown ? text : text.substr(0, kMaxShown) + "...";
}

}  // namespace

JsonField JsonField::at(const char* key) const {
  require(value_.is_object(), "an object");
  const auto found = value_.find(key);
  return {found == value_.end() ? kNull : *found, place_.empty() ? key : place_ + "." + key};
}

const std::string& JsonField::text() const {
  require(value_.is_string(), "a string");
  return value_.get_ref<const std::string&>();
}

bool JsonField::flag_or(bool otherwise) const {
  require(is_null() || value_.is_boolean(), "true or false");
  return is_null() ? otherwise : value_.get<bool>();
}

std::uint32_t JsonField::number_below(std::uint32_t limit) const {
  require(value_.is_number_unsigned() && value_.get<std::uint64_t>() < limit,
          "a number below " + std::to_string(limit));
  return value_.get<std::uint32_t>();
}

void JsonField::only(std::initializer_list<std::string_view> keys) const {
  require(value_.is_object(), "an object");
  for (const auto& [key, value] : value_.items()) {
    if (key != "type" && std::ranges::find(keys, key) == keys.end()) {
      JsonField(value, place_.empty() ? key : place_ + "." + key).refuse();
    }
  }
}

void JsonField::require(bool condition, std::string_view what) const {
  TESSERA_CHECK(condition, short_text(nlohmann::json(place_)), " is ", shown(), "; it must be ",
                what);
}

void JsonField::refuse() const {
  fail(short_text(nlohmann::json(place_)), " is ", shown(),
       ", which is not implemented; use a tokenizer without it");
}

std::string JsonField::shown() const {
  if (value_.is_structured() && value_.size() > kMaxShown) {
    return std::string("an ") + value_.type_name() + " of " + std::to_string(value_.size());
  }
  return short_text(value_);
}

}  // namespace tessera::data

// Reads JSON objects of a model folder, and checks each value when it is read.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"

namespace tessera::models {

/// An upper limit far above the size of any real file, because the file may come from an untrusted
/// source.
inline constexpr std::uint64_t kMaxConfigBytes = 10'000'000;

/// Parses a JSON object. The nesting depth is limited to what configurations need, because error
/// messages quote values.
inline nlohmann::json parse_object(const std::string& text, const std::string& origin) {
  try {
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    const std::string_view object =
        std::string_view(text).substr(begin == std::string::npos ? 0 : begin);
    tessera::detail::check_strict_json(object, {.depth = 16});
    return nlohmann::json::parse(object);
  } catch (const Error& error) {
    fail(origin, " is not a JSON object (", error.what(), "); expected a Hugging Face config.json");
  }
}

class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& json, const std::string& origin)
      : json_(json), origin_(origin) {}

  bool names(const char* key) const { return json_.contains(key); }
  // Whether config.json has the key with a value other than null. Hugging Face writes null for "not
  // set".
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }

  std::int64_t positive(const char* key) const {
    TESSERA_CHECK(has(key), origin_, ": \"", key, "\" is missing; a model's config.json needs it");
    return checked_positive(key, json_.at(key));
  }

  std::int64_t positive_or(const char* key, std::int64_t otherwise) const {
    return has(key) ? checked_positive(key, json_.at(key)) : otherwise;
  }

  double number(const char* key) const {
    TESSERA_CHECK(has(key), origin_, ": \"", key, "\" is missing, but other keys need it");
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_number() && value.get<double>() > 0, origin_, ": \"", key, "\" is ",
                  value.dump(), "; it must be a positive number");
    return value.get<double>();
  }

  double number_or(const char* key, double otherwise) const {
    return has(key) ? number(key) : otherwise;
  }

  /// The number of a key; 0 if the key is missing or null, which mean "none".
  double number_or_zero(const char* key) const {
    return has(key) && json_.at(key) != 0 ? number(key) : 0;
  }

  std::string text(const char* key) const {
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_string(), origin_, ": \"", key, "\" is ", value.dump(),
                  "; it must be a text");
    return value.get<std::string>();
  }

  bool flag_or(const char* key, bool otherwise) const {
    if (!has(key)) {
      return otherwise;
    }
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_boolean(), origin_, ": \"", key, "\" is ", value.dump(),
                  "; it must be true or false");
    return value.get<bool>();
  }

  /// The token or tokens of a key: a number, or an array of numbers.
  std::vector<std::int64_t> tokens(const char* key, std::int64_t vocabulary) const {
    if (!has(key)) {
      return {};
    }
    const nlohmann::json& value = json_.at(key);
    std::vector<std::int64_t> ids;
    for (const nlohmann::json& id : value.is_array() ? value : nlohmann::json::array({value})) {
      TESSERA_CHECK(id.is_number_unsigned() &&
                        id.get<std::uint64_t>() < static_cast<std::uint64_t>(vocabulary),
                    origin_, ": \"", key, "\" is ", value.dump(), "; tokens are numbers below ",
                    vocabulary);
      ids.push_back(id.get<std::int64_t>());
    }
    return ids;
  }

  /// Throws Error unless `key` is absent, null, or one of the allowed values.
  void only(const char* key, std::initializer_list<nlohmann::json> allowed,
            const char* feature) const {
    if (!has(key)) {
      return;
    }
    for (const nlohmann::json& value : allowed) {
      if (json_.at(key) == value) {
        return;
      }
    }
    fail(origin_, ": \"", key, "\" is ", json_.at(key).dump(), ", but ", feature,
         " not implemented; use a model without it");
  }

  const nlohmann::json& at(const char* key) const { return json_.at(key); }
  const std::string& origin() const { return origin_; }

 private:
  // Sizes must be below 2^31, so that the product of two sizes fits into 64 bits.
  std::int64_t checked_positive(const char* key, const nlohmann::json& value) const {
    TESSERA_CHECK(value.is_number_integer() && value.get<std::int64_t>() > 0 &&
                      value.get<std::int64_t>() < (std::int64_t{1} << 31),
                  origin_, ": \"", key, "\" is ", value.dump(), "; it must be a positive integer");
    return value.get<std::int64_t>();
  }

  const nlohmann::json& json_;
  const std::string& origin_;
};

}  // namespace tessera::models

#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::data {

/// A value of a tokenizer.json, with its place for messages. What it refers to must outlive it.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string place)
      : value_(value), place_(std::move(place)) {}

  const nlohmann::json& json() const { return value_; }
  bool is_null() const { return value_.is_null(); }

  /// A missing key is null.
  JsonField at(const char* key) const;
  /// For each element of an array.
  template <class Body>
  void for_each(Body&& body) const {
    require(value_.is_array(), "an array");
    for (std::size_t i = 0; i < value_.size(); ++i) {
      body(JsonField(value_[i], place_ + "[" + std::to_string(i) + "]"));
    }
  }

  const std::string& text() const;
  /// Null is `otherwise`.
  bool flag_or(bool otherwise) const;
  std::uint32_t number_below(std::uint32_t limit) const;
  /// The kind of component that an object says it is.
  const std::string& type() const { return at("type").text(); }

  /// Throws unless the object has no other keys than "type" and these.
  void only(std::initializer_list<std::string_view> keys) const;
  /// Throws unless `condition`: the value must be `what`.
  void require(bool condition, std::string_view what) const;
  /// Throws: this value is not implemented.
  [[noreturn]] void refuse() const;

 private:
  /// The value as it stands in the file, if it is short.
  std::string shown() const;

  const nlohmann::json& value_;
  std::string place_;
};

}  // namespace tessera::data

#include "tessera/core/detail/strict_json.h"

#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/core/detail/text_faults.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Looks at the text before there is a tree, which would silently keep the last of duplicate keys.
/// Not the parser's own callback: with one it goes over all siblings at the end of each object.
class Checker final : public nlohmann::json_sax<json> {
 public:
  explicit Checker(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return count_value(); }
  bool boolean(bool) override { return count_value(); }
  bool number_integer(number_integer_t) override { return count_value(); }
  bool number_unsigned(number_unsigned_t) override { return count_value(); }
  bool number_float(number_float_t, const string_t&) override { return count_value(); }
  bool string(string_t&) override { return count_value(); }
  bool binary(binary_t&) override { return count_value(); }
  bool start_object(std::size_t) override {
    objects_.emplace_back();
    return open();
  }
  bool end_object() override {
    objects_.pop_back();
    return close();
  }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    TESSERA_CHECK(++keys_ <= limits_.keys, "JSON has more than ", limits_.keys, " keys");
    TESSERA_CHECK(objects_.back().insert(name).second, "the JSON key ", json(name).dump(),
                  " appears twice");
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    fail("bad JSON (", error.what(), ")", detail::json_hint(error.what()));
  }

 private:
  bool count_value() {
    TESSERA_CHECK(++values_ <= limits_.values, "JSON has more than ", limits_.values, " values");
    return true;
  }
  bool open() {
    TESSERA_CHECK(depth_++ < limits_.depth, "JSON is nested deeper than ", limits_.depth,
                  " levels");
    return count_value();
  }
  bool close() {
    --depth_;
    return true;
  }

  JsonLimits limits_;
  int depth_ = 0;
  std::size_t keys_ = 0;
  std::size_t values_ = 0;
  std::vector<std::unordered_set<std::string>> objects_;  ///< keys of the objects that are open
};

}  // namespace

void check_strict_json(std::string_view text, const JsonLimits& limits) {
  // No white space, no byte order mark, no other kind of value.
  TESSERA_CHECK(!text.starts_with(detail::kByteOrderMark),
                "JSON begins with a byte order mark: save it without one");
  TESSERA_CHECK(text.starts_with('{'), "JSON does not begin with '{'");
  // The parser takes a NUL as the end of its input and would ignore what follows.
  TESSERA_CHECK(text.find('\0') == std::string::npos, "JSON contains a NUL byte");
  Checker checker(limits);
  json::sax_parse(text, &checker);
}

json detail::parse_strict_json(std::string_view text, const JsonLimits& limits) {
  check_strict_json(text, limits);
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    fail("bad JSON (", error.what(), ")");
  }
}

}  // namespace tessera

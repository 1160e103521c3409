#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Checks JSON text before parsing, because an nlohmann::json object silently keeps the last of
/// several equal keys. A SAX parser is faster than the callback of json::parse().
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
  /// The keys read so far of each JSON object that is not complete, the outermost object first.
  std::vector<std::unordered_set<std::string>> objects_;
};

}  // namespace

void detail::check_strict_json(std::string_view text, const JsonLimits& limits) {
  TESSERA_CHECK(!text.starts_with(kByteOrderMark),
                "JSON begins with a byte order mark: save the JSON without the mark");
  TESSERA_CHECK(text.starts_with('{'), "JSON does not begin with '{'");
  // The JSON parser takes a NUL byte as the end of its input and would ignore all later bytes.
  TESSERA_CHECK(text.find('\0') == std::string::npos, "JSON contains a NUL byte");
  Checker checker(limits);
  json::sax_parse(text, &checker);
}

void check_strict_json(std::string_view text) {
  detail::check_strict_json(text, JsonLimits{});
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

namespace tessera::detail {

std::string json_hint(std::string_view fault) {
  const bool is_number = fault.ends_with("N'") || fault.ends_with("I'");
  return is_number
             ? ": NaN and Infinity, which Python writes, are not valid JSON; write a number or null"
             : "";
}

void refuse_lfs_pointer(const std::filesystem::path& path, std::string_view content) {
  TESSERA_CHECK(
      !content.starts_with("version https://git-lfs.github.com/spec/"), "'", path.string(),
      "' is a Git LFS pointer to a file that was not downloaded: download the file (git lfs pull)");
}

}  // namespace tessera::detail

namespace tessera {
namespace {

/// Returns the Levenshtein distance. `diagonal` is entry j - 1 of the previous row of the table.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const auto closer = [&](const std::string& a, const std::string& b) {
    return edit_distance(word, a) < edit_distance(word, b);
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(), closer);
  return best == candidates.end() ? "" : *best;
}

}  // namespace tessera

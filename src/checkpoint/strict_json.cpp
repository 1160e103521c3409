#include "strict_json.h"

#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// Watches the parser's events: its tree would silently keep the last of duplicate keys.
class Watch {
 public:
  explicit Watch(const JsonLimits& limits) : limits_(limits) {}

  void event(int depth, json::parse_event_t event, const json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      TESSERA_CHECK(depth < limits_.depth, "JSON is nested deeper than ", limits_.depth, " levels");
    }
    if (event == Event::object_start) objects_.emplace_back();
    if (event == Event::object_end) objects_.pop_back();
    if (event == Event::key) key(parsed.get_ref<const std::string&>());
  }

 private:
  void key(const std::string& name) {
    TESSERA_CHECK(++keys_ <= limits_.keys, "JSON has more than ", limits_.keys, " keys");
    TESSERA_CHECK(objects_.back().insert(name).second, "the JSON key ", json(name).dump(),
                  " appears twice");
  }

  JsonLimits limits_;
  std::size_t keys_ = 0;
  std::vector<std::unordered_set<std::string>> objects_;  ///< keys of the objects that are open
};

}  // namespace

json parse_strict_json(std::string_view text, const JsonLimits& limits) {
  TESSERA_CHECK(text.starts_with('{'), "JSON does not begin with '{'");
  // The parser takes a NUL as the end of its input and would ignore what follows.
  TESSERA_CHECK(text.find('\0') == text.npos, "JSON contains a NUL byte");
  Watch watch(limits);
  try {
    return json::parse(text, [&](int depth, json::parse_event_t event, json& parsed) {
      watch.event(depth, event, parsed);
      return true;
    });
  } catch (const json::exception& error) {
    fail("bad JSON (", error.what(), ")");
  }
}

}  // namespace tessera::checkpoint

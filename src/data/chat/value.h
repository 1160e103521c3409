#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::data::chat {

using Json = nlohmann::ordered_json;

/// White space within a tag.
inline constexpr std::string_view kSpaces = " \t\n\r\f\v";

class Value;
using Values = std::vector<Value>;

/// What a function of a template is called with.
struct Arguments {
  Values positional;
  std::vector<std::pair<std::string, Value>> named;

  /// By its place or its name; undefined if it is not given.
  Value at(std::size_t place, const std::string& name) const;
  /// Throws Error for an argument that is none of `parameters`: "" is one without a name. `what`:
  /// what takes them.
  void require(const std::string& what, const std::vector<std::string_view>& parameters) const;
};
using Function = std::function<Value(const Arguments&)>;
using Fields = std::map<std::string, Value>;

/// A value of a template: JSON's, a namespace, a function, or undefined. Copies share what they
/// hold.
class Value {
 public:
  /// `name`: what is undefined, for messages.
  static Value undefined(std::string name) {
    Value value;
    value.name_ = std::move(name);
    return value;
  }
  static Value function(Function function) {
    Value value;
    value.function_ = std::make_shared<const Function>(std::move(function));
    return value;
  }
  static Value space(Fields fields) {
    Value value;
    value.fields_ = std::make_shared<Fields>(std::move(fields));
    return value;
  }

  Value() = default;
  Value(Json json) : json_(std::make_shared<const Json>(std::move(json))) {}  // NOLINT
  static Value list(const Values& values);

  bool is_undefined() const { return !json_ && !fields_ && !function_; }
  bool is_json() const { return json_ != nullptr; }
  bool is_none() const { return json_ && json_->is_null(); }
  bool is_text() const { return json_ && json_->is_string(); }
  bool is_list() const { return json_ && json_->is_array(); }
  bool is_map() const { return json_ && json_->is_object(); }
  bool is_integer() const { return json_ && json_->is_number_integer(); }
  bool is_number() const { return json_ && json_->is_number(); }
  Fields* fields() const { return fields_.get(); }

  /// These throw Error for a value of another kind.
  const Json& json() const;
  const std::string& text() const;
  std::int64_t integer() const;
  double number() const;
  Value call(const Arguments& arguments) const;
  /// What a loop goes over: elements, keys, characters.
  Values elements() const;

  /// Whether it is true in a condition.
  explicit operator bool() const;
  bool equals(const Value& other) const;
  /// An element or a field, without methods; undefined if there is none.
  Value item(const Value& key) const;
  /// As Python's str().
  std::string shown() const;
  std::string kind() const;

 private:
  /// A part of what this value holds.
  Value part(const Json& json) const;

  std::shared_ptr<const Json> json_;
  std::shared_ptr<Fields> fields_;
  std::shared_ptr<const Function> function_;
  std::string name_;
};

/// Options of Python's json.dumps().
struct DumpStyle {
  int indent = -1;  ///< one line
  bool ascii = false;
  bool sorts = false;
  std::string comma = ", ";
  std::string colon = ": ";
};
std::string dumped(const Json& json, const DumpStyle& style, int depth = 0);
/// As Python's repr().
std::string represented(const Json& json);

}  // namespace tessera::data::chat

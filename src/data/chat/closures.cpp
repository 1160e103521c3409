#include "chat/closures.h"

#include <utility>

#include "chat/functions.h"

namespace tessera::data::chat {

Expression constant(const Value& value) {
  return [value](State&) { return value; };
}

Expression named(const std::string& name) {
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    return constant(Json(name[0] == 't' || name[0] == 'T'));
  }
  if (name == "none" || name == "None") {
    return constant(Json());
  }
  return [name](State& state) { return variable(state, name); };
}

Expression list_of(std::vector<Expression> all) {
  return [all = std::move(all)](State& state) {
    Values values;
    for (const Expression& element : all) {
      values.push_back(element(state));
    }
    return Value::list(values);
  };
}

Value element(const Value& whole, const Value& key) {
  const Value found = whole.item(key);
  return found.is_undefined() && key.is_text() && whole.is_json() ? attribute(whole, key.text())
                                                                  : found;
}

}  // namespace tessera::data::chat

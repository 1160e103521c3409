#pragma once

#include <optional>
#include <string>

#include "chat/value.h"

namespace tessera::data::chat {

/// `value | name(arguments)`. Nothing for a filter that is not implemented.
std::optional<Value> filtered(const std::string& name, const Value& value,
                              const Arguments& arguments);
/// `value is name(arguments)`, likewise.
std::optional<bool> tested(const std::string& name, const Value& value, const Arguments& arguments);
/// `value.name`: a method or a field; undefined for another.
Value attribute(const Value& value, const std::string& name);
/// namespace, range, dict, raise_exception, strftime_now.
Fields global_functions();

}  // namespace tessera::data::chat

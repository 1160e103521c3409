#pragma once

#include <string>
#include <vector>

#include "chat/state.h"

namespace tessera::data::chat {

// Expressions without operators.

Expression constant(const Value& value);
/// A variable, or one of the words that stand for a value.
Expression named(const std::string& name);
Expression list_of(std::vector<Expression> all);
/// A field, or else a method, by a text.
Value element(const Value& whole, const Value& key);

}  // namespace tessera::data::chat

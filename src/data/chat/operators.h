#pragma once

#include <array>
#include <string>

#include "chat/value.h"

namespace tessera::data::chat {

/// `a sign b`, of "+" "-" "*" "/" "//" "%" "**".
Value arithmetic(const std::string& sign, const Value& a, const Value& b);
/// `a sign b` for "==" "!=" "<" "<=" ">" ">=" "in" "not in".
bool compared(const std::string& sign, const Value& a, const Value& b);
/// a[begin:end:step] of a list or a text.
Value sliced(const Value& value, const std::array<Value, 3>& bounds);

}  // namespace tessera::data::chat

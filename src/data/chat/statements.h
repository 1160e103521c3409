#pragma once

#include <string_view>

#include "chat/state.h"

namespace tessera::data::chat {

/// A template as one statement.
struct Program {
  Statement body;
  bool marks_generated = false;  ///< it has {% generation %}
};

/// Throws Error, with the line, for what is wrong or not implemented.
Program parse_template(std::string_view source);

}  // namespace tessera::data::chat

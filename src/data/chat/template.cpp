// The interpreter of chat templates.

#include "chat/template.h"

#include <utility>

#include "chat/functions.h"
#include "chat/statements.h"
#include "tessera/core/error.h"

namespace tessera::data::chat {

Template::Template(std::string_view source) {
  Program program = parse_template(source);
  body_ = std::move(program.body);
  marks_generated_ = program.marks_generated;
}

Template::Result Template::render(Fields variables) const {
  State state;
  for (auto& [name, value] : global_functions()) {
    variables.try_emplace(name, value);
  }
  state.scopes.push_back(std::move(variables));
  try {
    body_(state);
  } catch (const nlohmann::json::exception& error) {
    fail("a text is not valid UTF-8 (", error.what(), ")");
  }
  return {std::move(state.out), std::move(state.generated)};
}

}  // namespace tessera::data::chat

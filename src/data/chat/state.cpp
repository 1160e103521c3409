#include "chat/state.h"

namespace tessera::data::chat {

void count_step(State& state) {
  TESSERA_CHECK(++state.steps <= kMaxSteps && state.out.size() <= kMaxTextBytes,
                "the template takes more than ", kMaxSteps, " steps, or writes more than ",
                kMaxTextBytes, " bytes");
}

Value variable(const State& state, const std::string& name) {
  for (auto scope = state.scopes.rbegin(); scope != state.scopes.rend(); ++scope) {
    if (const auto found = scope->find(name); found != scope->end()) {
      return found->second;
    }
  }
  return Value::undefined(name);
}

}  // namespace tessera::data::chat

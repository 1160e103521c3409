#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "chat/value.h"
#include "tessera/core/error.h"

namespace tessera::data::chat {

// A template may be untrusted.
inline constexpr std::size_t kMaxSteps = 300'000;
inline constexpr std::size_t kMaxTextBytes = 64 << 20;
inline constexpr int kMaxDepth = 64;

/// Where a template is at: its variables, and what it has written.
struct State {
  std::vector<Fields> scopes;
  std::string out;
  std::vector<std::pair<std::size_t, std::size_t>> generated;  ///< spans of `out`: {% generation %}
  std::size_t steps = 0;
  int depth = 0;
};
enum class Flow { kNext, kBreak, kContinue };
using Expression = std::function<Value(State&)>;
using Statement = std::function<Flow(State&)>;

/// Adds the line of the template to what fails within.
template <class Body>
auto at_line(int line, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    const std::string what = error.what();
    if (what.starts_with("line ") || what.starts_with("the chat template says")) {
      throw;
    }
    fail("line ", line, ": ", what);
  }
}

/// Throws where a template does not end soon.
void count_step(State& state);

/// The innermost variable of that name; undefined if there is none.
Value variable(const State& state, const std::string& name);

}  // namespace tessera::data::chat

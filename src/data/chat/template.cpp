// The interpreter of chat templates: each statement becomes a closure.

#include "chat/template.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "chat/expressions.h"
#include "chat/functions.h"
#include "chat/lexer.h"
#include "chat/tokens.h"
#include "tessera/core/error.h"

namespace tessera::data::chat {
namespace {

/// A list of statements up to one of `ends`, which is taken.
class StatementParser {
 public:
  explicit StatementParser(std::string_view source) : parts_(parts_of(source)) {}

  Statement run() { return block({}); }
  bool marks_generated() const { return marks_generated_; }

 private:
  using Ends = std::vector<std::string_view>;

  // NOLINTBEGIN(misc-no-recursion): as deep as kMaxDepth.
  /// Leaves at_ at the part that ends it.
  Statement block(const Ends& ends) {
    TESSERA_CHECK(++depth_ <= kMaxDepth, "the template's blocks are too deep");
    std::vector<Statement> all;
    for (; at_ < parts_.size(); ++at_) {
      const TemplatePart& part = parts_[at_];
      if (part.kind == TemplatePart::Kind::kStatement &&
          std::ranges::find(ends, part.tokens[0].text) != ends.end()) {
        break;
      }
      all.push_back(statement(part));
    }
    TESSERA_CHECK(ends.empty() || at_ < parts_.size(), "'", ends.empty() ? "" : ends.back(),
                  "' is missing at the end");
    --depth_;
    return [all = std::move(all)](State& state) {
      for (const Statement& statement : all) {
        count_step(state);
        if (const Flow flow = statement(state); flow != Flow::kNext) {
          return flow;
        }
      }
      return Flow::kNext;
    };
  }

  Statement statement(const TemplatePart& part) {
    if (part.kind == TemplatePart::Kind::kText) {
      return [text = part.text](State& state) {
        state.out += text;
        return Flow::kNext;
      };
    }
    Tokens tokens(part);
    if (part.kind == TemplatePart::Kind::kExpression) {
      Expression value = whole(tokens);
      return [value](State& state) {
        state.out += value(state).shown();
        return Flow::kNext;
      };
    }
    const std::string kind = tokens.name();
    if (kind == "if") {
      return condition(tokens);
    }
    if (kind == "for") {
      return loop(tokens);
    }
    if (kind == "set") {
      return assignment(tokens);
    }
    if (kind == "macro") {
      return macro(tokens);
    }
    if (kind == "generation") {
      return generation();
    }
    if (kind == "break" || kind == "continue") {
      return [flow = kind == "break" ? Flow::kBreak : Flow::kContinue](State&) { return flow; };
    }
    tokens.refuse(kind);
  }

  static Expression whole(Tokens& tokens) {
    Expression value = tuple(tokens);
    tokens.expect_end();
    return value;
  }

  /// Whether the part that a block has ended at is `name`.
  bool is_at(std::string_view name) const { return parts_[at_].tokens[0].text == name; }

  Statement condition(Tokens& tokens) {
    std::vector<std::pair<Expression, Statement>> cases;
    cases.emplace_back(whole(tokens), inner({"elif", "else", "endif"}));
    Statement otherwise = [](State&) { return Flow::kNext; };
    while (!is_at("endif")) {
      Tokens next(parts_[at_]);
      if (next.name() == "elif") {
        Expression value = whole(next);
        cases.emplace_back(std::move(value), inner({"elif", "else", "endif"}));
      } else {
        otherwise = inner({"endif"});
      }
    }
    return [cases, otherwise](State& state) {
      for (const auto& [value, body] : cases) {
        if (value(state)) {
          return body(state);
        }
      }
      return otherwise(state);
    };
  }

  /// The block behind the part at at_.
  Statement inner(const Ends& ends) {
    ++at_;
    return block(ends);
  }

  static std::vector<std::string> targets(Tokens& tokens) {
    const bool has_bracket = tokens.take_if("(");
    std::vector<std::string> names{tokens.name()};
    while (tokens.take_if(",")) {
      names.push_back(tokens.name());
    }
    if (has_bracket) {
      tokens.expect(")");
    }
    return names;
  }

  static void assign(const std::vector<std::string>& names, const Value& value, Fields& scope) {
    if (names.size() == 1) {
      scope[names[0]] = value;
      return;
    }
    const Values parts = value.elements();
    TESSERA_CHECK(parts.size() == names.size(), parts.size(), " values are given to ", names.size(),
                  " names");
    for (std::size_t i = 0; i < names.size(); ++i) {
      scope[names[i]] = parts[i];
    }
  }

  Statement loop(Tokens& tokens) {
    const int line = tokens.line();
    const std::vector<std::string> names = targets(tokens);
    tokens.expect("in");
    Expression list = disjunction(tokens);
    Expression filter = tokens.take_if("if") ? conditional(tokens) : nullptr;
    tokens.expect_end();
    Statement body = inner({"else", "endfor"});
    Statement otherwise = is_at("else") ? inner({"endfor"}) : [](State&) { return Flow::kNext; };
    return [=](State& state) {
      const Value whole = list(state);
      Values all = at_line(line, [&] { return whole.elements(); });
      if (filter) {
        std::erase_if(all, [&](const Value& value) {
          state.scopes.emplace_back();
          at_line(line, [&] { assign(names, value, state.scopes.back()); });
          const auto kept = static_cast<bool>(filter(state));
          state.scopes.pop_back();
          return !kept;
        });
      }
      return all.empty() ? otherwise(state) : run_loop(state, all, names, body, line);
    };
  }

  static Flow run_loop(State& state, const Values& all, const std::vector<std::string>& names,
                       const Statement& body, int line) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      count_step(state);
      state.scopes.emplace_back();
      state.scopes.back()["loop"] = loop_fields(all, i);
      at_line(line, [&] { assign(names, all[i], state.scopes.back()); });
      const Flow flow = body(state);
      state.scopes.pop_back();
      if (flow == Flow::kBreak) {
        break;
      }
    }
    return Flow::kNext;
  }

  static Value loop_fields(const Values& all, std::size_t i) {
    const auto number = [](std::size_t value) {
      return Value(Json(static_cast<std::int64_t>(value)));
    };
    return Value::space(
        {{"index", number(i + 1)},
         {"index0", number(i)},
         {"revindex", number(all.size() - i)},
         {"revindex0", number(all.size() - i - 1)},
         {"length", number(all.size())},
         {"first", Json(i == 0)},
         {"last", Json(i + 1 == all.size())},
         {"depth", number(1)},
         {"depth0", number(0)},
         {"previtem", i > 0 ? all[i - 1] : Value::undefined("loop.previtem")},
         {"nextitem", i + 1 < all.size() ? all[i + 1] : Value::undefined("loop.nextitem")}});
  }

  Statement assignment(Tokens& tokens) {
    const int line = tokens.line();
    const std::vector<std::string> names = targets(tokens);
    if (tokens.take_if(".")) {
      return field_assignment(names[0], tokens);
    }
    if (tokens.take_if("=")) {
      return [names, value = whole(tokens), line](State& state) {
        const Value result = value(state);
        at_line(line, [&] { assign(names, result, state.scopes.back()); });
        return Flow::kNext;
      };
    }
    Expression text = [](State& state) -> Value { return Json(state.out); };
    while (tokens.take_if("|")) {
      text = filter(tokens, std::move(text));
    }
    tokens.expect_end();
    return [names, text, body = inner({"endset"})](State& state) {
      std::string before = std::exchange(state.out, "");
      body(state);
      const Value result = text(state);
      state.out = std::move(before);
      state.scopes.back()[names[0]] = result;
      return Flow::kNext;
    };
  }

  /// Reads "set name.field = value", where `name` is a namespace.
  static Statement field_assignment(const std::string& name, Tokens& tokens) {
    const int line = tokens.line();
    const std::string field = tokens.name();
    tokens.expect("=");
    return [name, field, value = whole(tokens), line](State& state) {
      const Value space = variable(state, name);
      TESSERA_CHECK(space.fields() != nullptr, "line ", line, ": '", name, "' is no namespace");
      (*space.fields())[field] = value(state);
      return Flow::kNext;
    };
  }

  Statement macro(Tokens& tokens) {
    const std::string name = tokens.name();
    tokens.expect("(");
    std::vector<std::pair<std::string, Expression>> parameters;
    while (!tokens.take_if(")")) {
      std::string parameter = tokens.name();
      Expression otherwise = tokens.take_if("=") ? conditional(tokens) : nullptr;
      parameters.emplace_back(std::move(parameter), std::move(otherwise));
      if (!tokens.next_is(")")) {
        tokens.expect(",");
      }
    }
    tokens.expect_end();
    const Statement body = inner({"endmacro"});
    return [name, parameters, body](State& state) {
      state.scopes.back()[name] =
          Value::function([&state, name, parameters, body](const Arguments& given) {
            given.require(name + "()", names_of(parameters));
            return call_macro(state, parameters, body, given);
          });
      return Flow::kNext;
    };
  }

  static std::vector<std::string_view> names_of(
      const std::vector<std::pair<std::string, Expression>>& parameters) {
    std::vector<std::string_view> names;
    for (const auto& [name, unused] : parameters) {
      names.push_back(name);
    }
    return names;
  }

  /// It sees what the template has set, and not what its caller has.
  static Value call_macro(State& state,
                          const std::vector<std::pair<std::string, Expression>>& parameters,
                          const Statement& body, const Arguments& given) {
    TESSERA_CHECK(++state.depth <= kMaxDepth, "macros call one another more than ", kMaxDepth,
                  " times");
    Fields own;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, otherwise] = parameters[i];
      const Value value = given.at(i, name);
      own[name] = value.is_undefined() && otherwise ? otherwise(state) : value;
    }
    std::vector<Fields> outer(state.scopes.begin() + kTopScopes, state.scopes.end());
    state.scopes.resize(kTopScopes);
    state.scopes.push_back(std::move(own));
    std::string before = std::exchange(state.out, "");
    body(state);
    std::string text = std::exchange(state.out, std::move(before));
    state.scopes.resize(kTopScopes);
    state.scopes.insert(state.scopes.end(), outer.begin(), outer.end());
    --state.depth;
    return Json(std::move(text));
  }

  Statement generation() {
    marks_generated_ = true;
    return [body = inner({"endgeneration"})](State& state) {
      const std::size_t begin = state.out.size();
      const Flow flow = body(state);
      state.generated.emplace_back(begin, state.out.size());
      return flow;
    };
  }
  // NOLINTEND(misc-no-recursion)

  static constexpr std::size_t kTopScopes = 1;

  std::vector<TemplatePart> parts_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool marks_generated_ = false;
};

}  // namespace

Template::Template(std::string_view source) {
  StatementParser parser(source);
  body_ = parser.run();
  marks_generated_ = parser.marks_generated();
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

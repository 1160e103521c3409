// Expressions of chat templates: each becomes a closure, as Jinja2's grammar says.

#include "chat/expressions.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "chat/closures.h"
#include "chat/functions.h"
#include "chat/operators.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

using Kind = Token::Kind;

/// Expressions, from what binds least to what binds most.
class ExpressionParser {
 public:
  explicit ExpressionParser(Tokens& tokens) : tokens_(tokens) {}

  // NOLINTBEGIN(misc-no-recursion): as deep as kMaxDepth.
  Expression conditional() {
    TESSERA_CHECK(++depth_ <= kMaxDepth, "line ", tokens_.line(), ": an expression is too deep");
    Expression value = disjunction();
    while (tokens_.take_if("if")) {
      Expression condition = disjunction();
      Expression otherwise =
          tokens_.take_if("else") ? conditional() : [](State&) { return Value::undefined("else"); };
      value = [value, condition, otherwise](State& state) {
        return condition(state) ? value(state) : otherwise(state);
      };
    }
    --depth_;
    return value;
  }

  /// a, b, or one of them alone.
  Expression tuple() {
    Expression first = conditional();
    if (!tokens_.next_is(",")) {
      return first;
    }
    std::vector<Expression> all{first};
    while (tokens_.take_if(",") && tokens_.peek().kind != Kind::kEnd && !tokens_.next_is(")")) {
      all.push_back(conditional());
    }
    return list_of(std::move(all));
  }

  Expression disjunction() {
    return junction("or", true, [&] { return conjunction(); });
  }

  /// name(arguments) behind "|".
  Expression filter(Expression value) {
    const std::string name = tokens_.name();
    return [value = std::move(value), name, given = arguments_if_any(),
            line = tokens_.line()](State& state) {
      const Value of = value(state);
      const Arguments arguments = given(state);
      return at_line(line, [&] {
        const auto result = filtered(name, of, arguments);
        TESSERA_CHECK(result, "the filter '", name, "' is not implemented");
        return *result;
      });
    };
  }

 private:
  Expression conjunction() {
    return junction("and", false, [&] { return negation(); });
  }

  /// The first operand that `decides`, or else the last one.
  template <class Operand>
  Expression junction(const char* word, bool decides, Operand operand) {
    Expression value = operand();
    while (tokens_.take_if(word)) {
      value = [a = value, b = operand(), decides](State& state) {
        const Value first = a(state);
        return static_cast<bool>(first) == decides ? first : b(state);
      };
    }
    return value;
  }

  Expression negation() {
    if (tokens_.take_if("not")) {
      TESSERA_CHECK(++depth_ <= kMaxDepth, "line ", tokens_.line(), ": an expression is too deep");
      Expression value = negation();
      --depth_;
      return [value](State& state) -> Value { return Json(!value(state)); };
    }
    return comparison();
  }

  /// a < b < c is both.
  Expression comparison() {
    Expression first = binary(0);
    std::vector<std::pair<std::string, Expression>> rest;
    while (const auto sign = comparing()) {
      rest.emplace_back(*sign, binary(0));
    }
    if (rest.empty()) {
      return first;
    }
    return [first, rest, line = tokens_.line()](State& state) -> Value {
      Value left = first(state);
      for (const auto& [sign, operand] : rest) {
        const Value right = operand(state);
        if (!at_line(line, [&, &sign = sign] { return compared(sign, left, right); })) {
          return Json(false);
        }
        left = right;
      }
      return Json(true);
    };
  }

  std::optional<std::string> comparing() {
    for (const char* sign : {"==", "!=", "<=", ">=", "<", ">", "in"}) {
      if (tokens_.take_if(sign)) {
        return sign;
      }
    }
    if (tokens_.take_if("not")) {
      tokens_.expect("in");
      return "not in";
    }
    return std::nullopt;
  }

  /// A level binds more than those before it.
  Expression binary(std::size_t level) {
    static const std::array<std::vector<const char*>, 4> all{
        {{"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}}};
    if (level == all.size()) {
      return signed_value(/*with_filters=*/true);
    }
    Expression value = binary(level + 1);
    while (true) {
      const auto sign =
          std::ranges::find_if(all.at(level), [&](const char* s) { return tokens_.take_if(s); });
      if (sign == all.at(level).end()) {
        return value;
      }
      value = [sign = std::string(*sign), a = value, b = binary(level + 1),
               line = tokens_.line()](State& state) {
        const Value left = a(state);
        const Value right = b(state);
        return at_line(line, [&]() -> Value {
          return sign == "~" ? Value(Json(left.shown() + right.shown()))
                             : arithmetic(sign, left, right);
        });
      };
    }
  }

  /// A sign is of the value before its filters.
  Expression signed_value(bool with_filters) {
    Expression value;
    if (tokens_.take_if("-")) {
      value = [operand = signed_value(false)](State& state) {
        return arithmetic("-", Json(0), operand(state));
      };
    } else if (tokens_.take_if("+")) {
      value = signed_value(false);
    } else {
      value = postfix(primary());
    }
    return with_filters ? filters(std::move(value)) : value;
  }

  Expression primary() {
    const Token token = tokens_.take();
    switch (token.kind) {
      case Kind::kText: {
        std::string text = token.text;
        while (tokens_.peek().kind == Kind::kText) {
          text += tokens_.take().text;
        }
        return constant(Json(text));
      }
      case Kind::kInteger:
        TESSERA_CHECK(token.text.size() < 19, "line ", tokens_.line(), ": ", token.text,
                      " is too large");
        return constant(Json(std::stoll(token.text)));
      case Kind::kFloat:
        return constant(Json(std::stod(token.text)));
      case Kind::kName:
        return named(token.text);
      default:
        break;
    }
    if (token.text == "(") {
      return parenthesized();
    }
    if (token.text == "[") {
      return list_of(list());
    }
    if (token.text == "{") {
      return map();
    }
    fail("line ", tokens_.line(), ": '", printable(token.text), "' stands where a value is needed");
  }

  /// Calls `each` for what stands between commas, up to `end`.
  template <class Each>
  void separated(std::string_view end, Each each) {
    while (!tokens_.take_if(end)) {
      each();
      if (!tokens_.next_is(end)) {
        tokens_.expect(",");
      }
    }
  }

  std::vector<Expression> list() {
    std::vector<Expression> all;
    separated("]", [&] { all.push_back(conditional()); });
    return all;
  }

  Expression parenthesized() {
    if (tokens_.take_if(")")) {
      return constant(Json::array());
    }
    Expression value = tuple();
    tokens_.expect(")");
    return value;
  }

  Expression map() {
    std::vector<std::pair<Expression, Expression>> all;
    separated("}", [&] {
      Expression key = conditional();
      tokens_.expect(":");
      all.emplace_back(std::move(key), conditional());
    });
    return [all](State& state) -> Value {
      Json map = Json::object();
      for (const auto& [key, value] : all) {
        map[key(state).text()] = value(state).json();
      }
      return map;
    };
  }

  Expression postfix(Expression value) {
    const int line = tokens_.line();
    while (true) {
      if (tokens_.take_if(".")) {
        const Token name = tokens_.take();
        value = [value, name = name.text, line](State& state) {
          const Value whole = value(state);
          return at_line(line, [&] { return attribute(whole, name); });
        };
      } else if (tokens_.take_if("[")) {
        value = subscript(std::move(value));
      } else if (tokens_.take_if("(")) {
        value = [value, arguments = arguments(), line](State& state) {
          const Value function = value(state);
          const Arguments given = arguments(state);
          return at_line(line, [&] { return function.call(given); });
        };
      } else {
        return value;
      }
    }
  }

  Expression subscript(Expression value) {
    std::array<Expression, 3> bounds;
    std::size_t count = 0;
    bool slices = false;
    while (!tokens_.take_if("]")) {
      if (tokens_.take_if(":")) {
        slices = true;
        ++count;
        TESSERA_CHECK(count < bounds.size(), "line ", tokens_.line(),
                      ": a slice has too many parts");
      } else {
        bounds.at(count) = conditional();
      }
    }
    TESSERA_CHECK(slices || bounds[0], "line ", tokens_.line(), ": [] is empty");
    return [value, bounds, slices, line = tokens_.line()](State& state) {
      const Value whole = value(state);
      std::array<Value, 3> values;
      for (std::size_t i = 0; i < bounds.size(); ++i) {
        values.at(i) = bounds.at(i) ? bounds.at(i)(state) : Value();
      }
      return at_line(line,
                     [&] { return slices ? sliced(whole, values) : element(whole, values[0]); });
    };
  }

  std::function<Arguments(State&)> arguments() {
    std::vector<Expression> positional;
    std::vector<std::pair<std::string, Expression>> named;
    separated(")", [&] {
      const std::size_t before = tokens_.place();
      const Token name = tokens_.take();
      if (name.kind == Kind::kName && tokens_.take_if("=")) {
        named.emplace_back(name.text, conditional());
      } else {
        tokens_.go_to(before);
        positional.push_back(conditional());
      }
    });
    return [positional, named](State& state) {
      Arguments given;
      for (const Expression& value : positional) {
        given.positional.push_back(value(state));
      }
      for (const auto& [name, value] : named) {
        given.named.emplace_back(name, value(state));
      }
      return given;
    };
  }

  std::function<Arguments(State&)> arguments_if_any() {
    return tokens_.take_if("(") ? arguments() : [](State&) { return Arguments(); };
  }

  Expression filters(Expression value) {
    while (true) {
      if (tokens_.take_if("|")) {
        value = filter(std::move(value));
      } else if (tokens_.take_if("is")) {
        value = test(std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression test(Expression value) {
    const bool negated = tokens_.take_if("not");
    const std::string name = tokens_.take().text;
    std::function<Arguments(State&)> given;
    if (begins_value(tokens_.peek())) {
      given = [operand = postfix(primary())](State& state) {
        return Arguments{{operand(state)}, {}};
      };
    } else {
      given = arguments_if_any();
    }
    return [value, name, negated, given, line = tokens_.line()](State& state) -> Value {
      const Value of = value(state);
      const Arguments arguments = given(state);
      return at_line(line, [&]() -> Value {
        const auto result = tested(name, of, arguments);
        TESSERA_CHECK(result, "the test '", printable(name), "' is not implemented");
        return Json(*result != negated);
      });
    };
  }
  // NOLINTEND(misc-no-recursion)

  static bool begins_value(const Token& token) {
    constexpr std::array kOthers{"else", "or", "and", "if", "is", "in", "not"};
    if (token.kind == Kind::kName) {
      return std::ranges::find(kOthers, token.text) == kOthers.end();
    }
    return token.kind == Kind::kText || token.kind == Kind::kInteger ||
           token.kind == Kind::kFloat || token.text == "[" || token.text == "{";
  }

  Tokens& tokens_;
  int depth_ = 0;
};

}  // namespace

Expression conditional(Tokens& tokens) {
  return ExpressionParser(tokens).conditional();
}
Expression tuple(Tokens& tokens) {
  return ExpressionParser(tokens).tuple();
}
Expression disjunction(Tokens& tokens) {
  return ExpressionParser(tokens).disjunction();
}
Expression filter(Tokens& tokens, Expression value) {
  return ExpressionParser(tokens).filter(std::move(value));
}

}  // namespace tessera::data::chat

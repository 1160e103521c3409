// The interpreter of chat templates: each part becomes a closure, as Jinja2's grammar says.

#include "chat/template.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "chat/functions.h"
#include "chat/lexer.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

// A template may be a stranger's.
constexpr std::size_t kMaxSteps = 300'000;
constexpr std::size_t kMaxTextBytes = 64 << 20;
constexpr int kMaxDepth = 64;

using Kind = Token::Kind;

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

Value arithmetic(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "+" && a.is_text() && b.is_text()) {
    return Json(a.text() + b.text());
  }
  if (sign == "+" && a.is_list() && b.is_list()) {
    Values all = a.elements();
    const Values more = b.elements();
    all.insert(all.end(), more.begin(), more.end());
    return Value::list(all);
  }
  if (sign == "*" && a.is_text()) {
    std::string out;
    for (std::int64_t i = 0; i < b.integer() && out.size() < kMaxTextBytes; ++i) {
      out += a.text();
    }
    return Json(out);
  }
  const double x = a.number();
  const double y = b.number();
  const bool divides = sign == "/" || sign == "//" || sign == "%";
  TESSERA_CHECK(!divides || y != 0, "a division by 0");
  const double result = sign == "+"    ? x + y
                        : sign == "-"  ? x - y
                        : sign == "*"  ? x * y
                        : sign == "/"  ? x / y
                        : sign == "//" ? std::floor(x / y)
                        : sign == "%"  ? x - y * std::floor(x / y)
                                       : std::pow(x, y);
  // What templates count is far below 2^53.
  const bool is_whole =
      a.is_integer() && b.is_integer() && sign != "/" && std::abs(result) < 0x1p53;
  return is_whole ? Json(static_cast<std::int64_t>(result)) : Json(result);
}

bool compared(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "==" || sign == "!=") {
    return a.equals(b) == (sign == "==");
  }
  if (sign == "in" || sign == "not in") {
    return *tested("in", a, {{b}, {}}) == (sign == "in");
  }
  const bool texts = a.is_text() && b.is_text();
  const bool less = texts ? a.text() < b.text() : a.number() < b.number();
  const bool more = texts ? b.text() < a.text() : b.number() < a.number();
  return sign == "<" ? less : sign == ">" ? more : sign == "<=" ? !more : !less;
}

/// a[begin:end:step] of a list or a text.
Value sliced(const Value& value, const std::array<Value, 3>& bounds) {
  const Values all = value.elements();
  const auto size = static_cast<std::int64_t>(all.size());
  const auto given = [&](std::size_t i) {
    return !bounds.at(i).is_undefined() && !bounds.at(i).is_none();
  };
  const std::int64_t step = given(2) ? bounds[2].integer() : 1;
  TESSERA_CHECK(step != 0, "a slice has a step of 0");
  const std::int64_t low = step > 0 ? 0 : -1;
  const std::int64_t high = step > 0 ? size : size - 1;
  const auto bound = [&](std::size_t i, std::int64_t otherwise) {
    if (!given(i)) {
      return otherwise;
    }
    const std::int64_t place = bounds.at(i).integer();
    return std::clamp(place < 0 ? place + size : place, low, high);
  };
  const std::int64_t begin = bound(0, step > 0 ? low : high);
  const std::int64_t end = bound(1, step > 0 ? high : low);
  Values some;
  for (std::int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    some.push_back(all[static_cast<std::size_t>(i)]);
  }
  if (!value.is_text()) {
    return Value::list(some);
  }
  std::string text;
  for (const Value& character : some) {
    text += character.text();
  }
  return Json(text);
}

/// Reads the tokens of one tag.
class Tokens {
 public:
  explicit Tokens(const Part& part) : part_(part) {}

  int line() const { return part_.line; }
  const Token& peek() const { return part_.tokens[at_]; }
  Token take() { return peek().kind == Kind::kEnd ? peek() : part_.tokens[at_++]; }

  bool next_is(std::string_view text) const {
    return (peek().kind == Kind::kSymbol || peek().kind == Kind::kName) && peek().text == text;
  }
  bool take_if(std::string_view text) {
    const bool is_next = next_is(text);
    at_ += is_next ? 1 : 0;
    return is_next;
  }
  void expect(std::string_view text) {
    TESSERA_CHECK(take_if(text), "line ", line(), ": '", text, "' is missing before '",
                  printable(peek().text), "'");
  }
  std::string name() {
    TESSERA_CHECK(peek().kind == Kind::kName, "line ", line(), ": a name is missing before '",
                  printable(peek().text), "'");
    return take().text;
  }
  void expect_end() const {
    TESSERA_CHECK(peek().kind == Kind::kEnd, "line ", line(), ": '", printable(peek().text),
                  "' is not implemented there");
  }
  std::size_t place() const { return at_; }
  void go_to(std::size_t place) { at_ = place; }
  [[noreturn]] void refuse(std::string_view what) const {
    fail("line ", line(), ": '", printable(what), "' is not implemented");
  }

 private:
  const Part& part_;
  std::size_t at_ = 0;
};

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
    while (tokens_.take_if(",") && tokens_.peek().kind != Kind::kEnd) {
      all.push_back(conditional());
    }
    return list_of(std::move(all));
  }

  Expression disjunction() {
    Expression value = conjunction();
    while (tokens_.take_if("or")) {
      value = [a = value, b = conjunction()](State& state) {
        const Value first = a(state);
        return first ? first : b(state);
      };
    }
    return value;
  }

 private:
  Expression conjunction() {
    Expression value = negation();
    while (tokens_.take_if("and")) {
      value = [a = value, b = negation()](State& state) {
        const Value first = a(state);
        return first ? b(state) : first;
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
    Expression first = sum();
    std::vector<std::pair<std::string, Expression>> rest;
    while (const auto sign = comparing()) {
      rest.emplace_back(*sign, sum());
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

  template <class Operand>
  Expression binary(std::initializer_list<const char*> signs, Operand operand) {
    Expression value = operand();
    while (true) {
      const auto* const sign =
          std::ranges::find_if(signs, [&](const char* s) { return tokens_.take_if(s); });
      if (sign == signs.end()) {
        return value;
      }
      value = [sign = std::string(*sign), a = value, b = operand(),
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

  Expression sum() {
    return binary({"+", "-"}, [&] { return joined(); });
  }
  Expression joined() {
    return binary({"~"}, [&] { return product(); });
  }
  Expression product() {
    return binary({"*", "/", "//", "%"}, [&] { return power(); });
  }
  Expression power() {
    return binary({"**"}, [&] { return signed_value(/*with_filters=*/true); });
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
      return list_of(list("]"));
    }
    if (token.text == "{") {
      return map();
    }
    fail("line ", tokens_.line(), ": '", printable(token.text), "' stands where a value is needed");
  }

  static Expression constant(const Value& value) {
    return [value](State&) { return value; };
  }

  static Expression named(const std::string& name) {
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      return constant(Json(name[0] == 't' || name[0] == 'T'));
    }
    if (name == "none" || name == "None") {
      return constant(Json());
    }
    return [name](State& state) { return variable(state, name); };
  }

  std::vector<Expression> list(std::string_view end) {
    std::vector<Expression> all;
    while (!tokens_.take_if(end)) {
      all.push_back(conditional());
      if (!tokens_.next_is(end)) {
        tokens_.expect(",");
      }
    }
    return all;
  }

  static Expression list_of(std::vector<Expression> all) {
    return [all = std::move(all)](State& state) {
      Values values;
      for (const Expression& element : all) {
        values.push_back(element(state));
      }
      return Value::list(values);
    };
  }

  Expression parenthesized() {
    if (tokens_.take_if(")")) {
      return constant(Json::array());
    }
    Expression first = conditional();
    if (tokens_.take_if(")")) {
      return first;
    }
    tokens_.expect(",");
    std::vector<Expression> all{first};
    for (Expression& element : list(")")) {
      all.push_back(std::move(element));
    }
    return list_of(std::move(all));
  }

  Expression map() {
    std::vector<std::pair<Expression, Expression>> all;
    while (!tokens_.take_if("}")) {
      Expression key = conditional();
      tokens_.expect(":");
      all.emplace_back(std::move(key), conditional());
      if (!tokens_.next_is("}")) {
        tokens_.expect(",");
      }
    }
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

  /// A field, or else a method, by a text.
  static Value element(const Value& whole, const Value& key) {
    const Value found = whole.item(key);
    return found.is_undefined() && key.is_text() && whole.is_json() ? attribute(whole, key.text())
                                                                    : found;
  }

  std::function<Arguments(State&)> arguments() {
    std::vector<Expression> positional;
    std::vector<std::pair<std::string, Expression>> named;
    while (!tokens_.take_if(")")) {
      const std::size_t before = tokens_.place();
      const Token name = tokens_.take();
      if (name.kind == Kind::kName && tokens_.take_if("=")) {
        named.emplace_back(name.text, conditional());
      } else {
        tokens_.go_to(before);
        positional.push_back(conditional());
      }
      if (!tokens_.next_is(")")) {
        tokens_.expect(",");
      }
    }
    return [positional, named](State& state) {
      Arguments given;
      for (const Expression& value : positional) {
        given.positional.push_back(value(state));
      }
      for (const auto& [name, value] : named) {
        given.named.emplace(name, value(state));
      }
      return given;
    };
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

 public:
  /// name(arguments) behind "|".
  Expression filter(Expression value) {
    const std::string name = tokens_.name();
    std::function<Arguments(State&)> given = [](State&) { return Arguments(); };
    if (tokens_.take_if("(")) {
      given = arguments();
    }
    return [value = std::move(value), name, given, line = tokens_.line()](State& state) {
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
  Expression test(Expression value) {
    const bool negated = tokens_.take_if("not");
    const std::string name = tokens_.take().text;
    std::function<Arguments(State&)> given = [](State&) { return Arguments(); };
    const Token& next = tokens_.peek();
    if (tokens_.take_if("(")) {
      given = arguments();
    } else if (begins_value(next)) {
      given = [operand = postfix(primary())](State& state) {
        return Arguments{{operand(state)}, {}};
      };
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
      const Part& part = parts_[at_];
      if (part.kind == Part::Kind::kStatement &&
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

  Statement statement(const Part& part) {
    if (part.kind == Part::Kind::kText) {
      return [text = part.text](State& state) {
        state.out += text;
        return Flow::kNext;
      };
    }
    Tokens tokens(part);
    if (part.kind == Part::Kind::kExpression) {
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
    Expression value = ExpressionParser(tokens).tuple();
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
    ExpressionParser expressions(tokens);
    Expression list = expressions.disjunction();
    Expression filter = tokens.take_if("if") ? expressions.conditional() : nullptr;
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
          const bool kept = static_cast<bool>(filter(state));
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
      text = ExpressionParser(tokens).filter(std::move(text));
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
      Expression otherwise = tokens.take_if("=") ? ExpressionParser(tokens).conditional() : nullptr;
      parameters.emplace_back(std::move(parameter), std::move(otherwise));
      if (!tokens.next_is(")")) {
        tokens.expect(",");
      }
    }
    tokens.expect_end();
    const Statement body = inner({"endmacro"});
    return [name, parameters, body](State& state) {
      state.scopes.back()[name] =
          Value::function([&state, parameters, body](const Arguments& given) {
            return call_macro(state, parameters, body, given);
          });
      return Flow::kNext;
    };
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

  std::vector<Part> parts_;
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

// Placements as text, both ways, in PyTorch's notation: what is printed can be parsed, and pasted
// into Python. Documents, messages and the command line use it.
#include "tessera/core/placement.h"

#include <array>
#include <cctype>
#include <charconv>
#include <optional>
#include <ostream>
#include <utility>

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// The one list of names: printing and parsing both read it.
constexpr std::array<std::pair<std::string_view, ReduceOp>, 5> kReduceOps{{
    {"sum", ReduceOp::kSum},
    {"avg", ReduceOp::kAvg},
    {"max", ReduceOp::kMax},
    {"min", ReduceOp::kMin},
    {"product", ReduceOp::kProduct},
}};

/// A visitor: a placement without its line here does not compile.
struct Printer {
  std::string operator()(const Replicate&) const { return "Replicate()"; }
  std::string operator()(const Shard& s) const { return detail::concat("Shard(", s.dim, ")"); }
  std::string operator()(const Partial& p) const {
    return detail::concat("Partial(", to_string(p.op), ")");
  }
  std::string operator()(const StridedShard& s) const {
    return detail::concat("_StridedShard(dim=", s.dim, ", sf=", s.split_factor, ")");
  }
};

/// PyTorch puts a space behind each comma, people do not always; no name contains one.
std::string without_spaces(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (!std::isspace(static_cast<unsigned char>(c))) {
      out += c;
    }
  }
  return out;
}

/// Keywords are optional: "Shard(dim=0)" is "Shard(0)".
std::string_view without_prefix(std::string_view text, std::string_view prefix) {
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

/// All of `text`, unlike std::stoll, which would take "0x" for 0.
std::optional<std::int64_t> integer(std::string_view text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) {
    return std::nullopt;
  }
  return value;
}

std::optional<Placement> parse_shard(std::string_view argument) {
  const auto dim = integer(without_prefix(argument, "dim="));
  if (!dim) {
    return std::nullopt;
  }
  return Shard{*dim};
}

/// "Partial()" is a sum, as in PyTorch.
std::optional<Placement> parse_partial(std::string_view argument) {
  if (argument.empty()) {
    return Partial{};
  }
  for (const auto& [name, op] : kReduceOps) {
    if (argument == name) {
      return Partial{op};
    }
  }
  return std::nullopt;
}

/// Both of its arguments are needed: a split factor has no default. PyTorch prints "sf=" and takes
/// "split_factor=".
std::optional<Placement> parse_strided_shard(std::string_view arguments) {
  const auto comma = arguments.find(',');
  if (comma == std::string_view::npos) {
    return std::nullopt;
  }
  const auto dim = integer(without_prefix(arguments.substr(0, comma), "dim="));
  const auto factor =
      integer(without_prefix(without_prefix(arguments.substr(comma + 1), "split_factor="), "sf="));
  if (!dim || !factor || *factor < 1) {
    return std::nullopt;
  }
  return StridedShard{*dim, *factor};
}

/// nullopt for whatever is not understood; the caller makes the message, with the text as it was
/// given.
std::optional<Placement> parse(std::string_view text) {
  if (text == "R") {
    return Replicate{};
  }
  if (text == "P") {
    return Partial{};
  }
  const auto open = text.find('(');
  if (open == std::string_view::npos || text.back() != ')') {
    return std::nullopt;
  }
  const auto name = text.substr(0, open);
  const auto arguments = text.substr(open + 1, text.size() - open - 2);
  if (name == "Replicate" && arguments.empty()) {
    return Replicate{};
  }
  if (name == "Shard" || name == "S") {
    return parse_shard(arguments);
  }
  if (name == "Partial" || name == "P") {
    return parse_partial(arguments);
  }
  if (name == "_StridedShard") {
    return parse_strided_shard(arguments);
  }
  return std::nullopt;
}

}  // namespace

/// Sum and average commute, as both are linear; of other pairs the order of reductions matters, and
/// Layout keeps it.
bool commute(ReduceOp a, ReduceOp b) {
  const auto is_linear = [](ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; };
  return a == b || (is_linear(a) && is_linear(b));
}

std::string to_string(ReduceOp op) {
  for (const auto& [name, value] : kReduceOps) {
    if (value == op) {
      return std::string(name);
    }
  }
  fail("to_string: ", static_cast<int>(op), " is not a ReduceOp");
}

std::string to_string(const Placement& placement) {
  return std::visit(Printer{}, placement);
}

std::string to_string(const Placements& placements) {
  std::string out = "[";
  for (std::size_t i = 0; i < placements.size(); ++i) {
    out += (i == 0 ? "" : ", ") + to_string(placements[i]);
  }
  return out + "]";
}

std::ostream& operator<<(std::ostream& stream, ReduceOp op) {
  return stream << to_string(op);
}

std::ostream& operator<<(std::ostream& stream, const Placement& placement) {
  return stream << to_string(placement);
}

std::ostream& operator<<(std::ostream& stream, const Placements& placements) {
  return stream << to_string(placements);
}

Placement parse_placement(std::string_view text) {
  const auto placement = parse(without_spaces(text));
  TESSERA_CHECK(placement, "placement \"", text,
                "\" is not understood; write Shard(0), Replicate(), Partial(sum|avg|max|min|"
                "product) or _StridedShard(dim=0, sf=2)");
  return *placement;
}

}  // namespace tessera

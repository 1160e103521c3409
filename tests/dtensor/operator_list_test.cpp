// docs/operators.md: how each of libtorch's operators is run on distributed tensors.

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera {
namespace {

constexpr std::string_view kNamespace = "aten::";

/// The overloads of each operator: " .Scalar .Tensor" behind "add", nothing behind "mm".
using Overloads = std::map<std::string, std::string>;

Overloads by_operator(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  Overloads overloads;
  for (const auto& name : names) {
    const auto dot = std::min(name.find('.'), name.size());
    auto& list = overloads[name.substr(0, dot)];
    if (dot < name.size()) list += " " + name.substr(dot);
  }
  return overloads;
}

/// All of libtorch's overloads that take a tensor, without the namespace, by how they are run.
struct Partition {
  std::vector<std::string> own, composed, defaults;
};

bool takes_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
}

Partition partition() {
  const auto ruled = ruled_operators();
  const std::set<std::string_view> has_rule(ruled.begin(), ruled.end());
  Partition result;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !name.name.starts_with(kNamespace) || !takes_tensors(op->schema())) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (has_rule.count(full) > 0) continue;
    const bool own = op->hasKernelForDispatchKey(c10::DispatchKey::Fake);
    const bool composed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    auto& list = own ? result.own : composed ? result.composed : result.defaults;
    list.push_back(full.substr(kNamespace.size()));
  }
  return result;
}

void write_family(std::ostream& out, const RuleFamily& family) {
  out << "\n### " << family.name << " (" << family.operators.size() << ")\n\n";
  std::vector<std::string> names;
  for (const auto op : family.operators) names.emplace_back(op.substr(kNamespace.size()));
  for (const auto& [name, list] : by_operator(names)) out << "* `" << name << "`" << list << "\n";
}

/// A line for each first letter.
void write_names(std::ostream& out, const char* title, const char* text,
                 const std::vector<std::string>& names) {
  out << "\n## " << title << " (" << names.size() << ")\n\n" << text;
  char initial = 0;
  for (const auto& [name, list] : by_operator(names)) {
    out << (name.front() == initial ? ", " : "\n* ") << "`" << name << "`" << list;
    initial = name.front();
  }
  out << "\n";
}

std::string render() {
  const auto lists = partition();
  std::ostringstream out;
  out << "# Operators\n\n"
         "How each operator of libtorch that takes a tensor is run on distributed ones. Generated "
         "from the\ntables in `src/core/rules/` and from libtorch's dispatcher: after a change, "
         "run "
         "`dtensor_test` with\n`TESSERA_UPDATE_DOCS=1`. Overloads stand behind their operator.\n\n"
         "## With a sharding rule ("
      << ruled_operators().size() << " overloads in " << rule_families().size()
      << " families)\n\n"
         "[sharding_rules.md](sharding_rules.md) says what they communicate.\n";
  for (const auto& family : rule_families()) write_family(out, family);
  write_names(out, "With a function of their own",
              "Read on the host, or composed otherwise than libtorch does.\n", lists.own);
  write_names(out, "Composed of others",
              "libtorch writes them in terms of other operators, each of which is run as listed "
              "here.\n",
              lists.composed);
  write_names(out, "Without a rule: the default",
              "The arguments are gathered, with a warning, or refused in a strict scope, and the "
              "result is\nreplicated. (A few, such as `equal`, exchange no more than their result "
              "where parts lie alike.)\n",
              lists.defaults);
  return out.str();
}

TEST(OperatorList, IsWhatTheDocumentationSays) {
  if (std::getenv("TESSERA_UPDATE_DOCS")) std::ofstream(TESSERA_OPERATORS_DOC) << render();
  std::ifstream file(TESSERA_OPERATORS_DOC);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(found == render()) << "docs/operators.md is out of date: run this test with "
                                    "TESSERA_UPDATE_DOCS=1 in the environment";
}

}  // namespace
}  // namespace tessera

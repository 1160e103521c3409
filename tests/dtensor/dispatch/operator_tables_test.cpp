#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lowerings/lowering.h"
#include "operators/operator_info.h"
#include "tessera/core/detail/rule_functions.h"

namespace tessera {

// Generates docs/operators/operators.md: how each libtorch operator runs on distributed tensors.

namespace {

constexpr std::string_view kNamespace = "aten::";

/// Maps an operator's name, such as "add", to its overloads, such as " .Scalar .Tensor".
using Overloads = std::map<std::string, std::string>;

Overloads by_operator(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  Overloads overloads;
  for (const auto& name : names) {
    const auto dot = std::min(name.find('.'), name.size());
    auto& list = overloads[name.substr(0, dot)];
    if (dot < name.size()) {
      list += " " + name.substr(dot);
    }
  }
  return overloads;
}

void write_family(std::ostream& out, const RuleFamily& family) {
  std::vector<std::string> names;
  for (const auto op : family.operators) {
    names.emplace_back(op.starts_with(kNamespace) ? op.substr(kNamespace.size()) : op);
  }
  out << "| " << family.name << " (" << family.operators.size() << ") |";
  const char* separator = " ";
  for (const auto& [name, list] : by_operator(names)) {
    out << std::exchange(separator, ", ") << "`" << name << "`" << list;
  }
  out << " |\n";
}

/// Maps each trait of operators to its text in docs/operators/operators.md, which continues the
/// sentence "For OPERATOR, ...".
const std::map<detail::Trait, const char*>& texts_of_traits() {
  using detail::Trait;
  static const std::map<Trait, const char*> texts{
      {Trait::kRandomInplace,
       "the random number of an element depends on the element's index in the global tensor, and "
       "nothing is gathered"},
      {Trait::kNativeDropout,
       "a `Partial` input is reduced first; whether an element is dropped depends on the element's "
       "index in the global tensor"},
      {Trait::kForeach,
       "the operator of single tensors is called for each position of the tensor lists"},
      {Trait::kOwnKernel,
       "a function in `src/dtensor/overrides/` replaces the operator on distributed tensors"},
      {Trait::kHelperTensors,
       "Tessera calls libtorch's decomposition into other operators, and treats plain tensors in "
       "the decomposition as replicated"},
      {Trait::kViewsMemory,
       "the storage offset of the local tensor is added to the argument `storage_offset`"},
      {Trait::kUnsafeView,
       "the local tensor is copied first if the local tensor cannot be viewed in the new sizes"},
      {Trait::kLeavesMemory,
       "the call is hidden from an `OperatorMode`: the call allocates memory and computes no "
       "values"},
      {Trait::kReadsOneValue,
       "a `StrictScope` permits the communication of the one value that the operator returns "
       "to the host"},
      {Trait::kNumberBesideSum,
       "a number argument multiplies no `Partial` sum, so infinity and NaN need no special case"},
      {Trait::kDivides, "a `Partial` sum is reduced first if the divisor is zero"},
      {Trait::kFailsByElement,
       "an index or value on one rank may cause an error, which all ranks throw with "
       "`TESSERA_DEBUG=1`"},
  };
  return texts;
}

void write_forms(std::ostream& out, bool own_collectives) {
  std::set<std::string_view> names;
  for (const auto& [name, form] : detail::all_lowerings()) {
    if (form.own_collectives == own_collectives) {
      names.insert(name);
    }
  }
  const char* separator = "* For ";
  for (const std::string_view name : names) {
    out << std::exchange(separator, ", ") << "`" << name << "`";
  }
}

void write_traits(std::ostream& out) {
  out << "\n## Special cases\n\n"
         "The table in `src/dtensor/operators/operator_info.cpp` lists operators that need special "
         "treatment; `.*` means every overload.\n\n";
  for (const auto& [trait, text] : texts_of_traits()) {
    const char* separator = "* For ";
    for (const detail::TraitRow& row : detail::trait_rows()) {
      if (row.trait != trait) {
        continue;
      }
      for (const std::string& name : detail::names_in(row.names)) {
        out << std::exchange(separator, ", ") << "`" << name << "`";
      }
    }
    out << ", " << text << ".\n";
  }
  write_forms(out, /*own_collectives=*/false);
  out << ", a lowering in `src/dtensor/lowerings/` is used if the lowering sends fewer bytes than "
         "a gather of the inputs.\n";
  write_forms(out, /*own_collectives=*/true);
  out << ", a lowering is always used, because the operator's purpose is the lowering's cheaper "
         "communication.\n";
}

std::string render() {
  std::ostringstream out;
  out << "# Operators\n\nThis page lists how Tessera runs each libtorch operator that takes a "
         "tensor on distributed tensors. `dtensor_test` with\n`TESSERA_UPDATE_DOCS=1` writes this "
         "page from the tables in `src/core/rules/` and `src/dtensor/`. The overloads of an "
         "operator\nfollow the operator's name. The last family contains Tessera's own operators "
         "(`src/dtensor/fused/`).\n\n## With a sharding rule ("
      << ruled_operators().size() << " overloads in " << rule_families().size()
      << " families)\n\n[sharding_rules.md](../sharding_rules.md) lists what each family of "
         "operators communicates.\n\n| family | operators |\n|---|---|\n";
  for (const auto& family : rule_families()) {
    write_family(out, family);
  }
  out << "\n## Without a sharding rule\n\nlibtorch composes many operators from other operators, "
         "and Tessera runs each of the other operators as this page lists. For\nany other "
         "operator without a sharding rule, Tessera gathers the arguments, with a warning, and "
         "replicates the result; a\n`StrictScope` refuses such an operator.\n";
  write_traits(out);
  return out.str();
}

TEST(OperatorList, MatchesTheDocumentation) {
  if (std::getenv("TESSERA_UPDATE_DOCS")) {
    std::ofstream(TESSERA_OPERATORS_DOC) << render();
  }
  std::ifstream file(TESSERA_OPERATORS_DOC);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(found == render())
      << "docs/operators/operators.md is out of date: run this test with "
         "TESSERA_UPDATE_DOCS=1 in the environment";
}

// Operators named in a row of detail::trait_rows() must exist and have the row's trait. These
// operators are listed in docs/operators/operators.md.

using detail::OperatorInfo;
using detail::Trait;
using detail::TraitRow;

std::vector<std::string> all_operators() {
  std::vector<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.starts_with(kNamespace) && c10::Dispatcher::singleton().findSchema(name)) {
      names.push_back(name.name.substr(kNamespace.size()));
      names.back() += name.overload_name.empty() ? "" : "." + name.overload_name;
    }
  }
  return names;
}

/// `name` is "add.Tensor" for libtorch's operators, "tessera::silu_mul" for the library's own.
const OperatorInfo& info_of(const std::string& name) {
  const bool whole = name.find("::") != std::string::npos;
  return detail::operator_info(
      detail::find_operator(whole ? name : std::string(kNamespace) + name));
}

std::vector<std::string> covered_by(const std::string& pattern) {
  static const std::vector<std::string> all = all_operators();
  std::vector<std::string> covered;
  std::ranges::copy_if(all, std::back_inserter(covered),
                       [&](const std::string& name) { return detail::covers(pattern, name); });
  return covered;
}

bool takes(const std::string& name, const std::string& argument) {
  const auto op = detail::find_operator(std::string(kNamespace) + name);
  return std::ranges::any_of(op.schema().arguments(), [&](const c10::Argument& parameter) {
    return parameter.name() == argument;
  });
}

bool has_kernel_of_ours(const std::string& name) {
  return detail::find_operator(std::string(kNamespace) + name)
      .hasKernelForDispatchKey(c10::DispatchKey::Fake);
}

bool is_functional(const OperatorInfo& info) {
  return info.written.empty() && info.viewed < 0;
}

using Fits = std::function<bool(const std::string& name, const OperatorInfo& info)>;

const std::map<Trait, Fits>& fits_by_trait() {
  static const std::map<Trait, Fits> all{
      {Trait::kRandomInplace,
       [](auto&, auto& info) {
         return info.draws_random && info.is_written(0) && info.generator >= 0 &&
                info.traits.fill() != nullptr;
       }},
      {Trait::kNativeDropout,
       [](auto&, auto& info) { return info.draws_random && info.returns.size() == 2; }},
      {Trait::kForeach, [](auto&, auto& info) { return info.is_list(0) || info.is_list(1); }},
      {Trait::kOwnKernel, [](auto& name, auto&) { return has_kernel_of_ours(name); }},
      {Trait::kHelperTensors, [](auto& name, auto&) { return has_kernel_of_ours(name); }},
      {Trait::kViewsMemory, [](auto& name, auto&) { return takes(name, "storage_offset"); }},
      {Trait::kUnsafeView, [](auto& name, auto&) { return takes(name, "size"); }},
      {Trait::kLeavesMemory,
       [](auto& name, auto& info) { return takes(name, "dtype") && is_functional(info); }},
      {Trait::kReadsOneValue,
       [](auto&, auto& info) { return info.returns.size() == 1 && !info.returns[0].is_tensor; }},
      {Trait::kNumberBesideSum, [](auto&, auto& info) { return info.takes_tensors; }},
      {Trait::kDivides, [](auto&, auto& info) { return info.takes_tensors; }},
      {Trait::kFailsByElement, [](auto&, auto& info) { return info.takes_tensors; }},
  };
  return all;
}

TEST(OperatorTraits, NameExistingOperatorsOfTheRightForm) {
  for (const TraitRow& row : detail::trait_rows()) {
    for (const std::string& pattern : detail::names_in(row.names)) {
      const auto covered = covered_by(pattern);
      EXPECT_FALSE(covered.empty()) << "libtorch has no operator " << pattern;
      for (const std::string& name : covered) {
        const OperatorInfo& info = info_of(name);
        EXPECT_TRUE(info.traits.has(row.trait)) << name;
        EXPECT_TRUE(fits_by_trait().at(row.trait)(name, info)) << name;
      }
    }
  }
}

TEST(OperatorTraits, AllHaveARow) {
  std::set<Trait> used;
  for (const TraitRow& row : detail::trait_rows()) {
    used.insert(row.trait);
  }
  EXPECT_EQ(used.size(), fits_by_trait().size());
  EXPECT_EQ(used.size(), static_cast<std::size_t>(Trait::kFailsByElement) + 1);
}

TEST(OperatorTraits, ListEveryKernelWithoutARule) {
  const auto ruled = ruled_operators();
  for (const std::string& name : all_operators()) {
    const detail::OperatorTraits traits(std::string(kNamespace) + name);
    const bool listed = traits.has(Trait::kOwnKernel) || traits.has(Trait::kHelperTensors);
    const bool has_rule = std::ranges::binary_search(ruled, std::string(kNamespace) + name);
    EXPECT_TRUE(listed || has_rule || !has_kernel_of_ours(name)) << name;
  }
}

TEST(OperatorTraits, LoweringsNameExistingOperators) {
  for (const auto& [name, form] : detail::all_lowerings()) {
    EXPECT_EQ(detail::lowering_of(info_of(std::string(name))), &form) << name;
  }
}

TEST(OperatorTraits, PatternsMatchOverloadsAndPrefixes) {
  EXPECT_TRUE(detail::covers("mul", "mul"));
  EXPECT_FALSE(detail::covers("mul", "mul.Tensor"));
  EXPECT_TRUE(detail::covers("mul.*", "mul"));
  EXPECT_TRUE(detail::covers("mul.*", "mul.Tensor"));
  EXPECT_FALSE(detail::covers("mul.*", "mul_.Tensor"));
  EXPECT_TRUE(detail::covers("_foreach_*", "_foreach_add_.List"));
  EXPECT_FALSE(detail::covers("_foreach_*", "foreach"));
}

TEST(OperatorTraits, AreEmptyForOtherNamespaces) {
  const detail::OperatorTraits own("user::uniform_");
  EXPECT_FALSE(own.has(Trait::kRandomInplace));
  EXPECT_EQ(own.fill(), nullptr);
}

}  // namespace
}  // namespace tessera

// The table of what is special about operators: every row names operators that exist and that are
// what its trait says, and docs/operators/operators.md lists them (operator_list_test.cpp).

#include "operators/operator_info.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lowerings/lowering.h"
#include "tessera/core/sharding_rule.h"

namespace tessera {
namespace {

using detail::OperatorInfo;
using detail::Trait;
using detail::TraitRow;

constexpr std::string_view kAtenNamespace = "aten::";

/// libtorch's operators, "add.Tensor".
std::vector<std::string> all_operators() {
  std::vector<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.starts_with(kAtenNamespace) && c10::Dispatcher::singleton().findSchema(name)) {
      names.push_back(name.name.substr(kAtenNamespace.size()));
      names.back() += name.overload_name.empty() ? "" : "." + name.overload_name;
    }
  }
  return names;
}

/// The operator is one of libtorch's, "add.Tensor", or of this library's, "tessera::silu_mul".
const OperatorInfo& info_of(const std::string& name) {
  const bool whole = name.find("::") != std::string::npos;
  return detail::operator_info(
      detail::find_operator(whole ? name : std::string(kAtenNamespace) + name));
}

/// The operators that a pattern of a row covers.
std::vector<std::string> covered_by(const std::string& pattern) {
  static const std::vector<std::string> all = all_operators();
  std::vector<std::string> covered;
  std::ranges::copy_if(all, std::back_inserter(covered),
                       [&](const std::string& name) { return detail::covers(pattern, name); });
  return covered;
}

bool takes(const std::string& name, const std::string& argument) {
  const auto op = detail::find_operator(std::string(kAtenNamespace) + name);
  return std::ranges::any_of(op.schema().arguments(), [&](const c10::Argument& parameter) {
    return parameter.name() == argument;
  });
}

bool has_kernel_of_ours(const std::string& name) {
  return detail::find_operator(std::string(kAtenNamespace) + name)
      .hasKernelForDispatchKey(c10::DispatchKey::Fake);
}

bool is_functional(const OperatorInfo& info) {
  return info.written.empty() && info.viewed < 0;
}

/// What an operator with a trait is, as far as its schema says.
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
      {Trait::kWritesGradients,
       [](auto&, auto& info) { return info.is_written(0) && info.functional.has_value(); }},
      {Trait::kNewZeros,
       [](auto&, auto& info) { return is_functional(info) && info.returns.size() == 1; }},
      {Trait::kOwnKernel, [](auto& name, auto&) { return has_kernel_of_ours(name); }},
      {Trait::kHelperTensors, [](auto& name, auto&) { return has_kernel_of_ours(name); }},
      {Trait::kViewsMemory, [](auto& name, auto&) { return takes(name, "storage_offset"); }},
      {Trait::kInfersSize,
       [](auto& name, auto&) { return takes(name, "size") || takes(name, "shape"); }},
      {Trait::kUnsafeView, [](auto& name, auto&) { return takes(name, "size"); }},
      {Trait::kLeavesMemory,
       [](auto& name, auto& info) { return takes(name, "dtype") && is_functional(info); }},
      {Trait::kReadsOneValue,
       [](auto&, auto& info) { return info.returns.size() == 1 && !info.returns[0].is_tensor; }},
      {Trait::kNumberBesideSum, [](auto&, auto& info) { return info.takes_tensors; }},
      {Trait::kDivides, [](auto&, auto& info) { return info.takes_tensors; }},
      {Trait::kFailsByMatrix, [](auto&, auto& info) { return info.check_errors < 0; }},
      {Trait::kFailsByElement, [](auto&, auto& info) { return info.takes_tensors; }},
  };
  return all;
}

TEST(OperatorTraits, NameOperatorsThatExistAndFit) {
  for (const TraitRow& row : detail::trait_rows()) {
    for (const std::string& pattern : detail::names_in(row)) {
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

TEST(OperatorTraits, HaveEachARow) {
  std::set<Trait> used;
  for (const TraitRow& row : detail::trait_rows()) {
    used.insert(row.trait);
  }
  EXPECT_EQ(used.size(), fits_by_trait().size());
  EXPECT_EQ(used.size(), static_cast<std::size_t>(Trait::kFailsByElement) + 1);
}

// A functional form takes the first arguments of what writes in place, and returns one tensor.
TEST(OperatorTraits, FunctionalFormsTakeTheArgumentsOfWhatTheyReplace) {
  for (const TraitRow& row : detail::trait_rows()) {
    if (row.trait != Trait::kWritesGradients) {
      continue;
    }
    for (const std::string& name : detail::names_in(row)) {
      const auto in_place = detail::find_operator(std::string(kAtenNamespace) + name);
      const auto functional = *info_of(name).functional;
      const auto& wanted = functional.schema().arguments();
      const auto& given = in_place.schema().arguments();
      ASSERT_LE(wanted.size(), given.size()) << name;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(wanted[i].type()->str(), given[i].type()->str()) << name << " " << i;
        EXPECT_EQ(wanted[i].alias_info(), nullptr) << name << " " << i;
      }
      EXPECT_EQ(functional.schema().returns().size(), 1u) << name;
    }
  }
}

// Kernels on our key are those of the table, and those with a rule that only take a shorter way.
TEST(OperatorTraits, ListEveryKernelThatStandsInsteadOfAPlan) {
  const auto ruled = ruled_operators();
  for (const std::string& name : all_operators()) {
    const detail::OperatorTraits traits(std::string(kAtenNamespace) + name);
    const bool listed = traits.has(Trait::kOwnKernel) || traits.has(Trait::kHelperTensors);
    const bool has_rule = std::ranges::binary_search(ruled, std::string(kAtenNamespace) + name);
    EXPECT_TRUE(listed || has_rule || !has_kernel_of_ours(name)) << name;
  }
}

TEST(OperatorTraits, FormsAreOfOperatorsThatExist) {
  for (const auto table : detail::lowering_tables()) {
    for (const detail::Lowering& form : table) {
      const auto forms = detail::lowerings_of(info_of(std::string(form.name)));
      EXPECT_NE(std::ranges::find(forms, &form), forms.end()) << form.name;
    }
  }
}

TEST(OperatorTraits, PatternsCoverOverloadsAndBeginnings) {
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

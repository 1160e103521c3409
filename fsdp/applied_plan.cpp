#include "applied_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

std::string text_of(const DeviceMesh& mesh) {
  return fmt::format("{} of ranks {}", to_string(mesh), fmt::join(mesh.ranks(), ", "));
}

/// A line for each unit and each of its parameters.
std::vector<std::string> lines_of(const std::vector<AppliedUnit>& units) {
  std::vector<std::string> lines;
  for (const AppliedUnit& unit : units) {
    lines.push_back(unit.line + " on " + text_of(unit.mesh));
    const std::string name = unit.line.substr(0, unit.line.find(' '));
    for (const AppliedParameter& parameter : unit.parameters) {
      lines.push_back(parameter.fqn + " in " + name + ": " + to_string(parameter.placement) +
                      (parameter.mesh == unit.mesh ? "" : " on " + text_of(parameter.mesh)) +
                      (parameter.extended ? " by an all-gather extension" : ""));
    }
  }
  return lines;
}

std::string missing(const std::vector<std::string>& from, const std::vector<std::string>& in) {
  std::string text;
  for (const std::string& line : from) {
    text += std::ranges::find(in, line) == in.end() ? "\n  " + line : "";
  }
  return text.empty() ? " nothing" : text;
}

}  // namespace

void check_same(const std::vector<AppliedUnit>& applied, const std::vector<AppliedUnit>& now) {
  if (applied == now) {
    return;
  }
  const std::vector<std::string> before = lines_of(applied);
  const std::vector<std::string> after = lines_of(now);
  fail("fully_shard: another plan was applied to this module. Only in the applied one:",
       missing(before, after), "\nonly in this one:", missing(after, before),
       before == after ? "\nthe meshes are of different worlds" : "");
}

ModuleTree plannable_tree(const nn::ModuleBase& root, const char* asked) {
  const auto applied = root.attached<AppliedPlan>();
  ModuleTree tree(root, true, applied ? applied->modules : ModuleTree::Modules());
  TESSERA_CHECK(!tree.nodes().empty(), asked, ": this ", root.name(),
                " is a unit already, made by hand or by the plan of a module that holds it; plan "
                "only modules that are none");
  return tree;
}

}  // namespace tessera::fsdp

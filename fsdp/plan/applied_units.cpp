// The text of plans: the table that a user prints, and the comparison of a plan with one that was
// applied before. Both use the same lines, so that differences look as in the table.

#include "plan/applied_units.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ostream>

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
    // The first column of the line is the unit's FQN.
    const std::string name = unit.line.substr(0, unit.line.find(' '));
    for (const AppliedParameter& parameter : unit.parameters) {
      lines.push_back(parameter.fqn + " in " + name + ": " + to_string(parameter.placement) +
                      (parameter.mesh == unit.mesh ? "" : " on " + text_of(parameter.mesh)) +
                      (parameter.extended ? " by an all-gather extension" : ""));
    }
  }
  return lines;
}

/// The lines of `from` that `in` lacks. Quadratic, for tables of some hundred lines.
std::string missing(const std::vector<std::string>& from, const std::vector<std::string>& in) {
  std::string text;
  for (const std::string& line : from) {
    text += std::ranges::find(in, line) == in.end() ? "\n  " + line : "";
  }
  return text.empty() ? " nothing" : text;
}

std::string dtype_name(const std::optional<c10::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "-";
}

/// What else differs from the defaults.
std::string notes_of(const Options& options) {
  std::string notes;
  if (options.mp_policy.output_dtype) {
    notes += " output " + dtype_name(options.mp_policy.output_dtype);
  }
  notes += options.mp_policy.cast_forward_inputs ? "" : " inputs not cast";
  notes += options.mp_policy.restore_input_dtype ? " input type restored" : "";
  if (options.offload_policy) {
    notes += options.offload_policy->pin_memory ? " offloaded" : " offloaded unpinned";
  }
  notes += options.shard_over_replicas ? " sharded over replicas" : "";
  notes += options.may_be_unused ? " may be unused" : "";
  return notes;
}

}  // namespace

std::string line_of(const PlannedUnit& unit) {
  const Options& o = unit.options;
  return fmt::format(
             "{:<32} {:>10} {:>14} {:>14} {:>8} {:>10} {:>10} {:>10}",
             unit.fqn.empty() ? "(root)" : unit.fqn, unit.parameters.size(), unit.numel,
             unit.frozen_numel,
             o.reshard_after_forward ? (*o.reshard_after_forward ? "yes" : "no") : "default",
             o.post_forward_mesh_size, dtype_name(o.mp_policy.param_dtype),
             dtype_name(o.mp_policy.reduce_dtype)) +
         notes_of(o);
}

std::string to_string(const WrapPlan& plan) {
  std::string text =
      fmt::format("{:<32} {:>10} {:>14} {:>14} {:>8} {:>10} {:>10} {:>10}\n", "unit", "parameters",
                  "elements", "frozen", "reshard", "post_fwd", "param", "reduce");
  for (const PlannedUnit& unit : plan) {
    text += line_of(unit) + "\n";
  }
  return text;
}

std::ostream& operator<<(std::ostream& stream, const WrapPlan& plan) {
  return stream << to_string(plan);
}

void check_same(const std::vector<AppliedUnit>& applied, const std::vector<AppliedUnit>& now) {
  if (applied == now) {
    return;
  }
  const std::vector<std::string> before = lines_of(applied);
  const std::vector<std::string> after = lines_of(now);
  fail("apply_plan: another plan was applied to this module. Only in the applied one:",
       missing(before, after), "\nonly in this one:", missing(after, before),
       // The lines have ranks and names of a mesh, which two worlds may share.
       before == after ? "\nthe meshes are of different worlds" : "");
}

}  // namespace tessera::fsdp

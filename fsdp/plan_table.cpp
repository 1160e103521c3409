#include "plan_table.h"

#include <fmt/format.h>

namespace tessera::fsdp {
namespace {

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
             o.neighbours, dtype_name(o.mp_policy.param_dtype),
             dtype_name(o.mp_policy.reduce_dtype)) +
         notes_of(o);
}

std::string to_string(const WrapPlan& plan) {
  std::string text =
      fmt::format("{:<32} {:>10} {:>14} {:>14} {:>8} {:>10} {:>10} {:>10}\n", "unit", "parameters",
                  "elements", "frozen", "reshard", "neighbours", "param", "reduce");
  for (const PlannedUnit& unit : plan) {
    text += line_of(unit) + "\n";
  }
  return text;
}

}  // namespace tessera::fsdp

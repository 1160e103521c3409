#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/fsdp/fully_shard.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// A module that may become an FSDP unit.
struct Candidate {
  const std::string& fqn;
  const nn::ModuleBase& module;
  /// The number of elements of the parameters, in the module and below, that are in no unit yet. A
  /// shared parameter counts once, in the first module that has the parameter.
  std::int64_t numel;
  const Options& root_options;
};

/// Decides whether a module becomes an FSDP unit. Returns the unit's options, or nullopt for no
/// unit. plan_units calls the policy once for each module, children first. The policy must return
/// the same options on every rank.
///   const fsdp::Policy policy =
///       [](const fsdp::Candidate& candidate) -> std::optional<fsdp::Options> {
///     if (!candidate.fqn.starts_with("block") || candidate.numel < 100) {
///       return std::nullopt;
///     }
///     fsdp::Options options = candidate.root_options;
///     options.reshard_after_forward = true;
///     return options;
///   };
///   fsdp::apply_plan(*model, mesh, fsdp::plan_units(*model, policy));
using Policy = std::function<std::optional<Options>(const Candidate& candidate)>;

/// A policy that makes modules units if `predicate` is true, with the root's options.
Policy wrap_if(std::function<bool(const Candidate&)> predicate);
/// A policy that makes modules of class M, or of derived classes, units with the root's options.
template <class M>
Policy wrap_class() {
  return wrap_if([](const Candidate& candidate) {
    return dynamic_cast<const M*>(&candidate.module) != nullptr;
  });
}
/// Chooses modules whose FQN matches a pattern (see nn::matches_fqn), such as "model.layers.*",
/// with the root's options. plan_units throws Error for a pattern that matches no FQN, unless the
/// policy is called by another policy.
Policy wrap_named(std::string pattern);

/// One FSDP unit of a WrapPlan.
struct PlannedUnit {
  std::string fqn;  ///< the FQN of the unit's module; "" is the root
  Options options;
  std::vector<std::string> parameters;  ///< the FQNs of the unit's parameters
  std::int64_t numel = 0;
  std::int64_t frozen_numel = 0;
};

/// The units of a model in the order in which they are applied: children first, the root last.
using WrapPlan = std::vector<PlannedUnit>;

/// Returns the FSDP units that `policy` chooses. The root always becomes a unit, with
/// `root_options`. Each parameter is in the lowest unit that contains all modules that share the
/// parameter. Modules that are units already, and modules below such modules, are left out. Changes
/// nothing and does not communicate. Throws Error for a unit with both frozen and trainable
/// parameters (unless Options::allow_mixed_frozen is set), for a module that cannot be a unit, and
/// for a parameter that is shared with a module outside of `root`.
WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy,
                    const Options& root_options = {});

/// Applies a wrap plan: calls fully_shard for each of its units. The plan's options may have been
/// changed. Not collective. Throws Error, before anything is changed, if the root is not the last
/// unit, if the plan names modules that the model does not have, if the parameters of a unit are
/// not those that plan_units finds for the plan's modules, and throws the errors of fully_shard.
///   const fsdp::WrapPlan plan = fsdp::plan_units(*model, fsdp::wrap_class<Block>());
///   fsdp::apply_plan(*model, mesh, plan);
void apply_plan(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan);

}  // namespace tessera::fsdp
TESSERA_API_END

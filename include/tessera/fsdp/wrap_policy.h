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

/// A module that may become a unit.
struct Candidate {
  const std::string& fqn;
  const nn::ModuleBase& module;
  /// Elements of the parameters in the module and below that are in no unit yet. A shared parameter
  /// counts once, in the first module that has it.
  std::int64_t numel;
  const Options& root_options;
};

/// Returns the options of the unit, or nullopt where the module does not become one. plan_units
/// calls it once for each module, children first. It must return the same on every rank.
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

/// Modules for which `predicate` is true, with the root's options.
Policy wrap_if(std::function<bool(const Candidate&)> predicate);
/// The same, with options of their own.
Policy wrap_if(std::function<bool(const Candidate&)> predicate, Options options);
/// Modules of class M or derived from it, with the root's options.
template <class M>
Policy wrap_class() {
  return wrap_if([](const Candidate& candidate) {
    return dynamic_cast<const M*>(&candidate.module) != nullptr;
  });
}
/// The same, with options of their own.
template <class M>
Policy wrap_class(Options options) {
  return wrap_if(
      [](const Candidate& candidate) {
        return dynamic_cast<const M*>(&candidate.module) != nullptr;
      },
      std::move(options));
}
/// Modules whose FQN matches a pattern (see nn::matches_fqn): "model.layers.*". plan_units throws
/// Error for a pattern that no FQN matches.
Policy wrap_named(std::string pattern);
/// The same, with options of their own.
Policy wrap_named(std::string pattern, Options options);
/// Modules with at least `numel` elements that are in no unit yet, with the root's options.
Policy wrap_larger_than(std::int64_t numel);
/// The result of the first policy that returns options.
Policy first_of(std::vector<Policy> policies);

/// One unit of a plan.
struct PlannedUnit {
  std::string fqn;  ///< "" is the root
  Options options;
  std::vector<std::string> parameters;  ///< FQNs
  std::int64_t numel = 0;
  std::int64_t frozen_numel = 0;
};

/// Units in the order in which they are applied: children first, the root last.
using WrapPlan = std::vector<PlannedUnit>;

/// The units that a policy chooses. The root is always one, with `root_options`. Each parameter is
/// in the lowest unit that holds all modules that share it. Modules that are units already, and
/// those below them, are left out. Changes nothing and communicates nothing. Throws Error for a
/// unit with frozen and trainable parameters (unless Options::allow_mixed_frozen), for a module
/// that cannot be a unit, and for a parameter shared with a module outside of `root`.
WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy,
                    const Options& root_options = {});

/// Applies a plan: fully_shard for each of its units. Not collective. Throws Error, before anything
/// is changed, if a parameter of the model that is not ignored is not in exactly one unit, if the
/// plan names modules or parameters that the model does not have, and as fully_shard does.
///   const fsdp::WrapPlan plan = fsdp::plan_units(*model, fsdp::wrap_class<Block>());
///   fsdp::apply_plan(*model, mesh, plan);
void apply_plan(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan);
/// On world_mesh(world).
void apply_plan(nn::ModuleBase& root, const comm::WorldPtr& world, const WrapPlan& plan);

}  // namespace tessera::fsdp
TESSERA_API_END

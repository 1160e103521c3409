#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/fsdp/fully_shard.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// A policy's options for a unit. What they leave empty is taken from the root's options.
struct UnitOptions {
  std::optional<MixedPrecisionPolicy> mp_policy{};
  /// An empty std::optional<OffloadPolicy> within says: not offloaded, though the root is.
  std::optional<std::optional<OffloadPolicy>> offload_policy{};
  std::optional<bool> reshard_after_forward{};
  std::optional<std::int64_t> post_forward_mesh_size{};
  std::optional<bool> shard_over_replicas{};
  std::optional<bool> may_be_unused{};
  /// Empty functions: those of the root's options. Names are within the unit.
  PlacementFunction shard_placement{};
  MeshFunction parameter_mesh{};
  ExtensionFunction all_gather_extension{};
  /// The unit may hold frozen and trainable parameters. Otherwise that is an Error: frozen ones
  /// would be gathered for backward with the others; in a separate unit they are not.
  bool allow_mixed_frozen = false;
};

/// A module that may become a unit, met bottom-up.
struct Candidate {
  const std::string& fqn;
  const nn::ModuleBase& module;
  /// Elements of the parameters in and below it that no unit has yet; of a shared one, only where
  /// it is met first.
  std::int64_t numel;
};

/// A pure function: whether a module becomes a unit, and with which options. It must return the
/// same on every rank. A program may write its own:
///   const fsdp::Policy policy =
///       [](const fsdp::Candidate& candidate) -> std::optional<fsdp::UnitOptions> {
///     if (!candidate.fqn.starts_with("block") || candidate.numel < 100) {
///       return std::nullopt;
///     }
///     return fsdp::UnitOptions{.reshard_after_forward = true};
///   };
///   fsdp::apply_plan(*model, mesh, fsdp::plan_units(*model, policy));
using Policy = std::function<std::optional<UnitOptions>(const Candidate& candidate)>;

/// Modules of class M (or derived from it).
template <class M>
Policy wrap_class(UnitOptions options = {}) {
  return [options](const Candidate& candidate) -> std::optional<UnitOptions> {
    if (dynamic_cast<const M*>(&candidate.module) == nullptr) {
      return std::nullopt;
    }
    return options;
  };
}
/// Modules whose FQN matches a pattern (see nn::matches_fqn): "model.layers.*". plan_units throws
/// Error where no module's does.
Policy wrap_named(std::string pattern, UnitOptions options = {});
/// Modules with at least `numel` elements that no unit has yet.
Policy wrap_larger_than(std::int64_t numel, UnitOptions options = {});
/// Modules for which `predicate` is true.
Policy wrap_if(std::function<bool(const Candidate&)> predicate, UnitOptions options = {});
/// The result of the first of several policies that returns options.
Policy first_of(std::vector<Policy> policies);

/// One unit of a plan.
struct PlannedUnit {
  std::string fqn;  ///< "" is the root
  Options options;
  std::vector<std::string> parameters;  ///< FQNs
  std::int64_t numel = 0;
  std::int64_t frozen_numel = 0;
};

/// Units in the order in which they are applied: bottom-up, the root last. A value: it names
/// modules and does not point to them.
using WrapPlan = std::vector<PlannedUnit>;

/// Whether the root may hold frozen and trainable parameters, as UnitOptions::allow_mixed_frozen.
enum class MixedFrozenRoot : std::uint8_t { kRefused, kAllowed };

/// What a policy makes of a module tree; the root is always a unit, with `root_options`. Each
/// parameter is in one unit: the lowest that holds all modules that share it, and each of them at
/// all places where it is registered. Existing units, made by fully_shard or by a plan of a part,
/// are left alone. Once a plan of this root is applied, the same policy returns that plan again.
/// Changes nothing and communicates nothing. Throws Error for a unit, the root among them, of
/// frozen and trainable parameters (unless allowed), naming them and the bytes, for a module that
/// cannot be a unit, and for a parameter shared with a module outside.
WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy,
                    const Options& root_options = {},
                    MixedFrozenRoot mixed_frozen_root = MixedFrozenRoot::kRefused);
/// A table, one line a unit: its FQN, how many parameters, elements and frozen elements it has, and
/// its options.
std::string to_string(const WrapPlan& plan);
/// Writes to_string(plan).
std::ostream& operator<<(std::ostream& stream, const WrapPlan& plan);

/// Applies a plan: fully_shard for each of its units. The same plan again, on the same mesh,
/// changes nothing; another one is an Error that shows where they differ: in units, options,
/// meshes, or the results of functions for a parameter. Not collective. Throws Error, before
/// anything is changed, if the plan does not fit the module tree, or does not have every parameter
/// that is not ignored in one unit, and as fully_shard does.
///   const fsdp::WrapPlan plan = fsdp::plan_units(*model, fsdp::wrap_class<Block>());
///   std::cout << plan;
///   fsdp::apply_plan(*model, mesh, plan);
void apply_plan(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan);
/// On world_mesh(world).
void apply_plan(nn::ModuleBase& root, const comm::WorldPtr& world, const WrapPlan& plan);
/// apply_plan's name before 0.2. A template, so that braces mean options and never a plan.
template <std::same_as<WrapPlan> Plan>
[[deprecated("use apply_plan")]] void fully_shard(nn::ModuleBase& root, const DeviceMesh& mesh,
                                                  const Plan& plan) {
  apply_plan(root, mesh, plan);
}
/// The same, on world_mesh(world).
template <std::same_as<WrapPlan> Plan>
[[deprecated("use apply_plan")]] void fully_shard(nn::ModuleBase& root, const comm::WorldPtr& world,
                                                  const Plan& plan) {
  apply_plan(root, world, plan);
}

}  // namespace tessera::fsdp
TESSERA_API_END

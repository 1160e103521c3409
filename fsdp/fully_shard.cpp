// The public functions of fully_shard.h check their arguments and call functions of FSDP units.

#include <c10/util/Exception.h>

#include <cmath>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/fsdp/detail/active_units.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/module.h"
#include "unit.h"

namespace tessera::fsdp {

namespace {

void check_module(const nn::ModuleBase* module, const char* caller) {
  TESSERA_CHECK(module != nullptr, caller, " was given a null module");
  TESSERA_CHECK(module->attached<Unit>() == nullptr,
                "fully_shard or replicate was applied to this ", module->name(),
                " already; apply one of them once to each module");
  TESSERA_CHECK(dynamic_cast<const nn::ModuleList*>(module) == nullptr, caller,
                " was applied to a ModuleList, which has no forward; apply ", caller,
                " to the modules in the list");
  TESSERA_CHECK(dynamic_cast<const nn::AdoptedModule*>(module) == nullptr, caller, ": a ",
                module->name(),
                " inside a module that nn::Hooked holds runs without the hooks that gather "
                "parameters; apply ",
                caller, " to the module that nn::Hooked holds");
}

/// All checks precede all changes, so that an error leaves the model unchanged.
void make_checked_unit(const std::vector<nn::ModuleBase*>& modules, const DataMesh& mesh,
                       const Options& options) {
  TESSERA_CHECK(!modules.empty(),
                "fully_shard was given an empty list of modules; pass at least one module");
  for (const nn::ModuleBase* module : modules) {
    check_module(module, mesh.caller());
  }
  // Units below `module` keep their parameters, so inner modules must come first.
  const nn::NamedSlots parameters = free_parameters(modules, options, mesh.caller());
  const UnitSpec spec = checked_spec(modules, parameters, mesh, options);
  for (const nn::ModuleBase* module : modules) {
    warn_of_batch_norm(*module, mesh.ranks());
  }
  make_unit(spec);
}

/// Warns if a write to an unsharded parameter will be lost. Ignores an exception of the warning,
/// because a destructor calls this function.
void warn_of_lost_write(const Unit& unit) noexcept {
  try {
    if (const std::string lost = unit.write_by_hand(); !lost.empty()) {
      TORCH_WARN(lost);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

template <class T>
void set_each(nn::ModuleBase& module, bool recurse, const char* caller, T Settings::*field,
              const std::type_identity_t<T>& value) {
  for (const std::shared_ptr<Unit>& unit : units_of(module, recurse, caller)) {
    unit->settings().*field = value;
  }
}

std::vector<std::weak_ptr<Unit>> each_unit_of(const std::vector<nn::ModuleBase*>& modules,
                                              const char* caller) {
  // The pointers are weak: units that prefetch each other would form a reference cycle.
  std::vector<std::weak_ptr<Unit>> units;
  for (const nn::ModuleBase* module : modules) {
    TESSERA_CHECK(module != nullptr, caller, " was given a null module");
    units.push_back(unit_of(*module, caller));
  }
  return units;
}

}  // namespace

void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options) {
  fully_shard(std::vector<nn::ModuleBase*>{&module}, mesh, options);
}

void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options) {
  make_checked_unit(modules, DataMesh(mesh), options);
}

void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options) {
  TESSERA_CHECK(
      !options.shard_placement && !options.parameter_mesh && options.post_forward_mesh_size == 1,
      "replicate: the options set shard_placement, parameter_mesh or post_forward_mesh_size, but "
      "replicate does not split parameters; leave these options out, or apply fully_shard");
  // replicate() is FSDP on a mesh whose sharding dimension has one rank, so every parameter is
  // replicated.
  Options replicated = options;
  replicated.shard_placement = [](const std::string&, const at::Tensor&) {
    return std::optional<Placement>(Replicate{});
  };
  make_checked_unit({&module}, DataMesh::replicating(mesh), replicated);
}

double mean_weight(std::int64_t rows, const DeviceMesh& mesh) {
  TESSERA_CHECK(mesh, "mean_weight: the mesh is undefined; pass the mesh of fully_shard");
  nn::note_weighing();
  std::vector<std::vector<std::int64_t>> of_ranks{{rows}};
  if (mesh.size() > 1) {
    of_ranks = comm::gather_on_hosts(mesh.group_of_all_ranks(), {rows});
  }
  std::int64_t all = 0;
  bool negative = false;
  for (const std::vector<std::int64_t>& own : of_ranks) {
    all += own.front();
    negative = negative || own.front() < 0;
  }
  TESSERA_CHECK(all > 0 && !negative, "mean_weight: this rank passed ", rows,
                " rows, and all ranks of ", to_string(mesh), " passed ", all,
                "; a number of rows must not be negative, and at least one rank must have rows");
  return static_cast<double>(rows) * static_cast<double>(mesh.size()) / static_cast<double>(all);
}

DeviceMesh world_mesh(const comm::WorldPtr& world) {
  TESSERA_CHECK(world != nullptr,
                "world_mesh: the world is null; pass the result of comm::world_from_environment()");
  return init_device_mesh(world, {world->size()}, {"dp"});
}

ActiveUnits::ActiveUnits(const nn::ModuleBase& model) : units_(units_of(model, /*recurse=*/true)) {}

std::string ActiveUnits::text() const {
  const Unit* inner = nullptr;
  for (const std::shared_ptr<Unit>& unit : units_) {  // units_ begins with the outermost unit
    const UnitPhase phase = unit->phase();
    if (phase == UnitPhase::kBackward || phase == UnitPhase::kForward ||
        phase == UnitPhase::kForwardRecorded) {
      inner = unit.get();
    }
  }
  if (inner == nullptr) {
    return "";
  }
  const bool backward = inner->phase() == UnitPhase::kBackward;
  return (backward ? "the backward of " : "the forward of ") + inner->label();
}

std::string current_unit(const nn::ModuleBase& module) {
  return ActiveUnits(module).text();
}

// Outside of a root's forward the program can have written the shards, so await_compute() precedes
// the gather.
void unshard(nn::ModuleBase& module) {
  const std::shared_ptr<Unit> unit = unit_of(module, "unshard");
  unit->await_compute();
  unit->unshard();
}

void reshard(nn::ModuleBase& module) {
  const std::shared_ptr<Unit> unit = unit_of(module, "reshard");
  const std::string lost = unit->write_by_hand();
  // The unit is resharded before the check, so that the program can continue after the error.
  unit->reshard();
  TESSERA_CHECK(lost.empty(), lost);
}

UnshardHandle start_unshard(nn::ModuleBase& module) {
  const std::shared_ptr<Unit> unit = unit_of(module, "start_unshard");
  unit->await_compute();
  unit->start_unshard();
  // The handle has a weak pointer to the unit, because the model can be destroyed before wait().
  return UnshardHandle(unit);
}

void UnshardHandle::wait() {
  if (const std::shared_ptr<Unit> unit = std::exchange(unit_, {}).lock()) {
    unit->unshard();
  }
}

UnshardScope::UnshardScope(nn::ModuleBase& module)
    : unit_(unit_of(module, "UnshardScope")), was_unsharded_(unit_->unsharded()) {
  const bool was_installed = unit_->installed();
  unit_->await_compute();
  unit_->unshard();
  if (was_installed) {
    // Does not free parameters that an outer UnshardScope or a running forward still needs.
    unit_.reset();
  }
}

UnshardScope::~UnshardScope() {
  if (unit_ != nullptr) {
    warn_of_lost_write(*unit_);
    was_unsharded_ ? unit_->install_sharded() : unit_->reshard();
  }
}

void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse) {
  set_each(module, recurse, "set_reshard_after_forward", &Settings::reshard_after_forward, reshard);
}

void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse) {
  set_each(module, recurse, "set_reshard_after_backward", &Settings::reshard_after_backward,
           reshard);
}

void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse) {
  set_each(module, recurse, "set_requires_gradient_sync", &Settings::gradient_sync, sync);
}

void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse) {
  set_each(module, recurse, "set_requires_all_reduce", &Settings::all_reduce, all_reduce);
}

void set_is_last_backward(nn::ModuleBase& module, bool last) {
  set_each(module, true, "set_is_last_backward", &Settings::last_backward, last);
}

void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse) {
  set_each(module, recurse, "set_unshard_in_backward", &Settings::unshard_in_backward, unshard);
}

void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse) {
  TESSERA_CHECK(factor > 0 && std::isfinite(factor), "set_gradient_divide_factor: the factor is ",
                factor, ", but must be positive and finite; pass for example the number of ranks");
  set_each(module, recurse, "set_gradient_divide_factor", &Settings::gradient_divisor, factor);
}

void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse) {
  set_each(module, recurse, "set_force_sum_reduction", &Settings::force_sum, force);
}

void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse) {
  set_each(module, recurse, "set_all_reduce_hook", &Settings::all_reduce_hook, hook);
}

void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event) {
  const std::shared_ptr<Unit> unit = unit_of(root, "set_post_optim_event");
  TESSERA_CHECK(!unit->is_below_root(), "set_post_optim_event: ", unit->label(),
                " is not the root unit; pass the outermost module that fully_shard was applied to");
  unit->settings().post_optim_event = std::move(event);
}

void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units) {
  unit_of(module, "set_forward_prefetch")->settings().forward_prefetch =
      each_unit_of(units, "set_forward_prefetch");
}

void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units) {
  unit_of(module, "set_backward_prefetch")->settings().backward_prefetch =
      each_unit_of(units, "set_backward_prefetch");
}

}  // namespace tessera::fsdp

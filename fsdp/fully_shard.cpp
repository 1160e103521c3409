#include "tessera/fsdp/fully_shard.h"

#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/containers.h"
#include "unit.h"
#include "unit_lookup.h"
#include "unit_parameters.h"

namespace tessera::fsdp {
namespace {

void check_module(const nn::ModuleBase* module) {
  TESSERA_CHECK(module != nullptr, "fully_shard was given a null module");
  TESSERA_CHECK(!is_fully_sharded(*module), "fully_shard or replicate was applied to this ",
                module->name(), " already; apply one of them once to each module");
  TESSERA_CHECK(
      dynamic_cast<const nn::ModuleList*>(module) == nullptr,
      "fully_shard: a ModuleList has no forward to gather before; apply it to the modules "
      "in it");
}

void make_checked_unit(const std::vector<nn::ModuleBase*>& modules, const DataMesh& mesh,
                       const Options& options) {
  TESSERA_CHECK(!modules.empty(), "fully_shard was given no module");
  for (const nn::ModuleBase* module : modules) {
    check_module(module);
  }
  const nn::NamedSlots parameters = free_parameters(modules, options);
  check_parameters(parameters, mesh, options);
  make_unit(modules, parameters, mesh, options);
}

std::vector<std::weak_ptr<Unit>> each_unit_of(const std::vector<nn::ModuleBase*>& modules,
                                              const char* asked) {
  std::vector<std::weak_ptr<Unit>> units;
  for (const nn::ModuleBase* module : modules) {
    TESSERA_CHECK(module != nullptr, asked, " was given a null module");
    units.push_back(unit_of(*module, asked));
  }
  return units;
}

}  // namespace

void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options) {
  fully_shard(std::vector<nn::ModuleBase*>{&module}, mesh, options);
}

void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options) {
  make_checked_unit(modules, data_mesh_of(mesh, options), options);
}

void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options) {
  TESSERA_CHECK(!options.shard_placement && !options.parameter_mesh && options.neighbours == 1 &&
                    !options.shard_over_replicas && !options.all_gather_extension,
                "replicate: the options say how to split parameters (shard_placement, "
                "parameter_mesh, neighbours, shard_over_replicas or all_gather_extension), but "
                "each rank keeps them whole; leave these out or apply fully_shard");
  Options whole = options;
  whole.shard_placement = [](const std::string&, const at::Tensor&) {
    return std::optional<Placement>(Replicate{});
  };
  make_checked_unit({&module}, DataMesh::replicating(mesh), whole);
}

DeviceMesh world_mesh(const comm::WorldPtr& world) {
  TESSERA_CHECK(world != nullptr,
                "world_mesh: the world is null; pass that of comm::world_from_environment()");
  return init_device_mesh(world, {world->size()}, {"dp"});
}

void fully_shard(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options) {
  fully_shard(module, world_mesh(world), options);
}

void fully_shard(const std::vector<nn::ModuleBase*>& modules, const comm::WorldPtr& world,
                 const Options& options) {
  fully_shard(modules, world_mesh(world), options);
}

void replicate(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options) {
  replicate(module, world_mesh(world), options);
}

bool is_fully_sharded(const nn::ModuleBase& module) {
  return module.attached<Unit>() != nullptr;
}

void unshard(nn::ModuleBase& module) {
  const std::shared_ptr<Unit> unit = unit_of(module, "unshard");
  unit->await_compute();
  unit->unshard();
}

void reshard(nn::ModuleBase& module) {
  unit_of(module, "reshard")->reshard();
}

UnshardHandle start_unshard(nn::ModuleBase& module) {
  const std::shared_ptr<Unit> unit = unit_of(module, "start_unshard");
  unit->await_compute();
  unit->start_unshard();
  return UnshardHandle(unit);
}

void UnshardHandle::wait() {
  if (const std::shared_ptr<Unit> unit = std::exchange(unit_, {}).lock()) {
    unit->unshard();
  }
}

UnshardScope::UnshardScope(nn::ModuleBase& module) : unit_(unit_of(module, "UnshardScope")) {
  if (unit_->unsharded()) {
    unit_.reset();
  } else {
    unit_->await_compute();
    unit_->unshard();
  }
}

UnshardScope::~UnshardScope() {
  if (unit_ != nullptr) {
    unit_->reshard();
  }
}

void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_reshard_after_forward")) {
    unit->settings().reshard_after_forward = reshard;
  }
}

void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_reshard_after_backward")) {
    unit->settings().reshard_after_backward = reshard;
  }
}

void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_requires_gradient_sync")) {
    unit->settings().gradient_sync = sync;
  }
}

void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_requires_all_reduce")) {
    unit->set_all_reduce(all_reduce);
  }
}

void set_is_last_backward(nn::ModuleBase& module, bool last) {
  for (const auto& unit : units_of(module, true, "set_is_last_backward")) {
    unit->settings().last_backward = last;
  }
}

void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_unshard_in_backward")) {
    unit->settings().unshard_in_backward = unshard;
  }
}

void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse) {
  TESSERA_CHECK(factor > 0 && std::isfinite(factor), "set_gradient_divide_factor: ", factor,
                " is not positive and finite; pass the number of ranks, say");
  for (const auto& unit : units_of(module, recurse, "set_gradient_divide_factor")) {
    unit->set_gradient_divisor(factor);
  }
}

void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_force_sum_reduction")) {
    unit->set_force_sum(force);
  }
}

void set_unshard_async_op(nn::ModuleBase& module, bool async_op, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_unshard_async_op")) {
    unit->set_unshard_async_op(async_op);
  }
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

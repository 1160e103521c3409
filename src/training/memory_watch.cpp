#include "memory_watch.h"

#include <string_view>
#include <utility>

#include "tessera/comm/streams.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::training {

namespace {

at::Tensor part_of_rank(const at::Tensor& tensor) {
  return is_distributed(tensor) ? local_tensor(tensor) : tensor;
}

}  // namespace

MemoryWatch::MemoryWatch(const std::string& device) {
  if (device == "cpu") {
    log_.emplace(observe::TensorMemoryOptions{});
    comm::set_host_streams(log_->memory_lanes(comm::make_streams(c10::kCPU)));
  }
}

MemoryWatch::~MemoryWatch() {
  if (log_) {
    comm::set_host_streams(nullptr);
  }
}

void MemoryWatch::begin_step(const nn::ModuleBase& model) {
  if (log_) {
    log_->begin_step([&model] { return fsdp::under_way(model); });
  }
}

void MemoryWatch::end_step(const observe::StepMetrics& metrics, const nn::ModuleBase& model,
                           optim::Optimizer& optimizer) {
  observe::RankMemory memory{.step = metrics.step,
                             .peak_reserved_bytes = metrics.peak_memory_bytes,
                             .peak_active_bytes = metrics.peak_active_bytes};
  if (log_) {
    if (units_.empty()) {
      find_units(model);
    }
    assign_state(model, optimizer);
    memory.tensors = log_->use(
        /*on_host=*/false, [this](const std::string& module) { return unit_of(module); });
  }
  const auto peak = [](const observe::RankMemory& of) {
    return of.tensors ? of.tensors->peak_bytes : of.peak_active_bytes.value_or(0);
  };
  // The first step makes the optimizer's state: what is of it shows in the later ones.
  if (++steps_ <= 2 || peak(memory) > peak(most_)) {
    most_ = std::move(memory);
  }
}

/// They have their names from the first forward on.
void MemoryWatch::find_units(const nn::ModuleBase& model) {
  nn::visit_modules(model, [this](const std::string& fqn, const nn::ModuleBase& module) {
    if (fqn.empty() || fsdp::is_fully_sharded(module)) {
      units_[fqn] = fsdp::unit_name(module);
    }
  });
}

/// Made before any module ran, or by the update.
void MemoryWatch::assign_state(const nn::ModuleBase& model, optim::Optimizer& optimizer) {
  std::map<const nn::ParameterSlot*, std::string> modules;
  for (const auto& [name, slot] : model.named_slots()) {
    modules[slot.get()] = name.substr(0, name.rfind('.'));
    log_->assign(part_of_rank(slot->persistent()), modules[slot.get()]);
  }
  for (const optim::StateTensor& state : optimizer.state()) {
    log_->assign(part_of_rank(state.tensor), modules[state.slot.get()]);
  }
}

std::string MemoryWatch::unit_of(const std::string& module) const {
  std::string_view fqn = module;
  while (!fqn.empty()) {
    if (const auto found = units_.find(fqn); found != units_.end()) {
      return found->second;
    }
    const std::size_t dot = fqn.rfind('.');
    fqn = fqn.substr(0, dot == std::string_view::npos ? 0 : dot);
  }
  return units_.at("");
}

void MemoryWatch::write(const std::filesystem::path& path, comm::World& world,
                        const std::string& place) {
  most_.place = place;
  observe::write_memory_report(path, world, most_);
}

}  // namespace tessera::training

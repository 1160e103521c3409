// What a rank would hold and send in a step of any model, in one process and without values.

#pragma once

#include <iostream>
#include <memory>
#include <optional>

#include "tessera/tessera.hpp"

namespace vit {

/// Prints the plan of rank 0 of `ranks`, its memory at the peak, and its metrics of a step as JSON.
/// `make(world, recording)`: the pointer to an object with `model`, whose plan `recording` has
/// applied, and `step(n)`, which returns metrics. The second step is shown: the first one makes the
/// optimizer's state.
template <class Make>
void print_plan(int ranks, const Make& make) {
  using namespace tessera;
  observe::MemoryLog log({.reserve_only = true});
  comm::set_host_streams(log.memory_lanes(comm::make_streams(c10::kCPU)));
  const kernels::FakeMode fake;
  std::optional<tensor_parallel::PlanRecording> recording;
  {
    const auto run = make(comm::fake_world(/*rank=*/0, ranks), recording);
    const auto where = [&] { return fsdp::under_way(*run->model); };
    log.begin_step(where);
    run->step(0);
    for (const auto& [name, slot] : run->model->named_slots()) {
      log.assign(local_tensor(slot->persistent()), name);
    }
    log.begin_step(where);
    observe::StepMetrics metrics;
    std::cout << recording->record([&] { metrics = run->step(1); });
    const observe::StepMemory memory = log.use(/*on_host=*/false);
    std::cout << "peak " << memory.peak_bytes << " bytes, in " << memory.peak_moment << ": of them";
    for (std::size_t kind = 0; kind < observe::kMemoryKinds; ++kind) {
      std::cout << (kind > 0 ? ", " : " ") << to_string(static_cast<observe::MemoryKind>(kind))
                << " " << memory.at_peak[kind];
    }
    std::cout << "\n" << to_json(metrics) << std::endl;
  }
  comm::set_host_streams(nullptr);
}

}  // namespace vit

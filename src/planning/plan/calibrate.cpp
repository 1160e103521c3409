// The work of a step as its plan counts it, by the seconds that it took. Products and attention are
// timed by a callback of libtorch's dispatcher, which changes nothing of what they compute.

#include "tessera/planning/calibrate.h"

#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>

#include "schedule/schedule.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/observe/device.h"

namespace tessera::planning {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 2, kSteps = 5;
/// The rates of the machine whose plans say how much work a step is.
constexpr double kFlops = 1e9, kBandwidth = 1e12;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

/// What a step takes, and its parts.
struct StepSeconds {
  double total = 0, products = 0, attention = 0, collectives = 0;
  int timed = 0;  ///< products and attentions that have ended
  double others() const { return total - products - attention - collectives; }
};

/// The step that this thread makes.
thread_local StepSeconds step_seconds;

struct Began final : at::ObserverContext {
  Clock::time_point at = Clock::now();
  int timed = step_seconds.timed;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const bool timed = is_product(function.name()) || is_attention(function.name());
  return timed ? std::make_unique<Began>() : nullptr;
}

void end(const at::RecordFunction& function, at::ObserverContext* began) {
  const auto* call = static_cast<const Began*>(began);
  if (call == nullptr) {
    return;
  }
  // A call of a distributed tensor holds that of the local one, and what it communicates.
  if (call->timed == step_seconds.timed) {
    const bool attends = is_attention(function.name());
    (attends ? step_seconds.attention : step_seconds.products) += seconds_since(call->at);
  }
  ++step_seconds.timed;
}

StepSeconds measure(const Run& run) {
  const comm::CallRecorder collectives(run.mesh.world()->traffic());
  step_seconds = {};
  const auto began = Clock::now();
  run.step();
  step_seconds.total = seconds_since(began);
  for (const comm::CollectiveCall& call : collectives.calls()) {
    step_seconds.collectives += std::chrono::duration<double>(call.exposed()).count();
  }
  return step_seconds;
}

StepSeconds median_step(const Run& run) {
  for (int i = 0; i < kWarmUp; ++i) {
    run.step();
  }
  const auto callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
  const auto remove = c10::make_scope_exit([&] { at::removeCallback(callback); });
  std::array<StepSeconds, kSteps> steps;
  std::ranges::generate(steps, [&] { return measure(run); });
  std::ranges::sort(steps, {}, &StepSeconds::total);
  return steps[kSteps / 2];
}

/// A machine with this host's memory, so slow in FLOPs that a product takes longer for them than
/// for its bytes.
Machine slow_machine(int ranks) {
  return {.name = "CPU",
          .memory_bytes = static_cast<double>(observe::physical_memory_bytes()) / ranks,
          .reserved_bytes = 0,
          .flops_half = kFlops,
          .flops_fp32 = kFlops,
          .product_share = 1,
          .attention_share = 1,
          .memory_bandwidth = kBandwidth,
          .memory_share = 1,
          .operator_latency_s = 0,
          .ranks_per_node = ranks,
          .link_bandwidth = kBandwidth,
          .network_bandwidth = kBandwidth,
          .network_share = 1,
          .link_latency_s = 0,
          .network_latency_s = 0};
}

/// `otherwise`: the rate of work that the step does not have.
double rate_of(double work, double seconds, double otherwise) {
  return work > 0 && seconds > 0 ? work / seconds : otherwise;
}

}  // namespace

Machine calibrate(const MakeRun& make, const comm::WorldPtr& world, PlanOptions options) {
  TESSERA_CHECK(options.device == "cpu", "calibrate() measures steps on a CPU, not on ",
                options.device, "; plan for a machine with its data sheet's rates instead");
  const StepSeconds took = median_step(make(world));
  Machine machine = slow_machine(world->size());
  const auto planned = [&](double attention_share) {
    options.machine = machine;
    options.machine->attention_share = attention_share;
    return *plan_rank(make, world->size(), world->rank(), options).time;
  };
  const StepTime plan = planned(1);
  const double attention = 2 * kFlops * (plan.compute - planned(2).compute);
  const double bytes = kBandwidth * (plan.compute - plan.flops / kFlops);
  double sent = 0;
  for (const auto& [group, seconds] : plan.communication) {
    sent += kBandwidth * seconds;
  }
  TESSERA_CHECK(
      took.others() > 0, "a step took ", took.total,
      " s, no longer than its products, attention and collectives; measure a longer step");
  machine.memory_bandwidth = rate_of(bytes, took.others(), kBandwidth);
  const double products = rate_of(plan.flops - attention, took.products, kFlops);
  machine.flops_half = machine.flops_fp32 = products;
  machine.attention_share = rate_of(attention, took.attention, products) / products;
  // Collectives of a host are copies, as most other operators are.
  machine.link_bandwidth = rate_of(sent, took.collectives, machine.memory_bandwidth);
  machine.network_bandwidth = machine.link_bandwidth;
  return machine;
}

}  // namespace tessera::planning

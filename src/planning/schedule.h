// Simulates when the operators and collectives of a training step run. Each stream of a device and
// the network of each process group have a clock. Operators and collectives advance a clock.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/observe/metrics.h"
#include "tessera/planning/machine.h"
#include "tessera/planning/plan.h"

namespace tessera::planning {

/// Computes the times of a step's operators and collectives. An operator takes the longer of the
/// times for its FLOPs and for its bytes. A collective takes the time for its bytes on the slowest
/// link. Collectives of one process group run one after another. On a GPU, collectives slow matrix
/// products and attention. The CPU is assumed to run ahead.
class Schedule final : public comm::Streams {
 public:
  /// Computes no times if `machine` is nullopt. `lanes`: whether the device has several streams. If
  /// `lanes` is false, as on a CPU, operators and collectives run one after another.
  Schedule(const std::optional<Machine>& machine, bool lanes)
      : machine_(machine), has_lanes_(lanes) {}

  /// Adds an operator to the schedule. `phase`: the phase of the step, such as forward.
  void run(const kernels::FakeCall& call, observe::MemoryPhase phase);
  comm::WorkPtr start(const comm::FakeCollective& call);
  /// Begins a step, and discards the times of the previous step.
  void begin_step();
  StepTime time() const;

  comm::StreamEventPtr record(comm::Lane which) override;
  void wait(comm::Lane which, const comm::StreamEventPtr& event) override;
  void synchronize(const comm::StreamEventPtr& event) override {
    wait(comm::Lane::kCompute, event);
  }

 private:
  /// The time that a stream's clock shows. `cause`: the mesh dimension of the last collective for
  /// which the stream has waited.
  struct Moment {
    double time = 0;
    std::string cause;
  };
  struct Event;
  class Transfer;

  void enter(comm::Lane lane) override { current_ = lane; }
  void leave() override { current_ = comm::Lane::kCompute; }
  Moment& lane(comm::Lane which) {
    return lanes_[has_lanes_ ? static_cast<std::size_t>(which) : 0];
  }
  void wait(comm::Lane which, const Moment& moment);
  void add_span(const std::string& row, const std::string& what, double begin, double end);
  double duration(const comm::FakeCollective& call) const;
  double lost_to_collectives(double begin, double seconds);

  std::optional<Machine> machine_;
  bool has_lanes_;
  comm::Lane current_ = comm::Lane::kCompute;
  std::array<Moment, 4> lanes_{};
  std::map<std::string, double> networks_;  ///< when each process group's network becomes idle
  /// Begin and end times of collectives that can overlap with later operators, sorted by begin.
  std::multimap<double, double> transfers_;
  double began_ = 0;
  StepTime step_;
};

/// Computes tokens_per_s, tflops and mfu from step_time_s. `products`: the FLOPs of one rank's
/// matrix products, used if `options` has no model FLOPs.
void set_speed(observe::StepMetrics& metrics, std::int64_t ranks, double products,
               const PlanOptions& options);

}  // namespace tessera::planning

// When a step's work would be done: each lane of a device, and the network of each group, is a
// clock that goes on with what is issued there.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/plan/machine.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/fake_world.h"
#include "tessera/comm/streams.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/observe/memory_log.h"

namespace llama {

/// Something that takes time in a step, in seconds from its begin.
struct Span {
  /// "operators" of the compute lane, "waiting" there, or the mesh dimension of a collective.
  std::string row;
  std::string what;  ///< the phase of operators, the cause of waiting, or the collective
  double begin = 0, end = 0;
};

/// What a step takes, in seconds.
struct StepTime {
  double total = 0;
  double compute = 0;  ///< operators of the compute lane, without what it waits for
  /// What the compute lane waits for, by mesh dimension.
  std::map<std::string, double> exposed;
  std::map<std::string, double> communication;  ///< of all collectives, by mesh dimension
  double flops = 0;                             ///< of all products, those computed again too
  std::vector<Span> spans;                      ///< operators of a phase without a gap are one
};

/// The host is taken to be ahead of the device, which holds for large models. An operator takes its
/// FLOPs or its bytes at the machine's rates; a collective takes its bytes at those of the slowest
/// link of a ring, and runs beside everything but collectives of its group.
class Schedule {
 public:
  /// Without a machine it keeps no time. Without lanes, as on a CPU, all is in the order of its
  /// issue, and events have passed.
  Schedule(const std::optional<Machine>& machine, bool lanes)
      : machine_(machine), has_lanes_(lanes) {}

  /// `phase`: that the call is in.
  void run(const tessera::kernels::FakeCall& call, tessera::observe::MemoryPhase phase);
  tessera::comm::WorkPtr start(const tessera::comm::FakeCollective& call);
  /// Forgets what was before.
  void begin_step();
  StepTime time() const;

  // Lanes, as comm::Streams.
  void enter(tessera::comm::Lane lane) { current_ = lane; }
  void leave() { current_ = tessera::comm::Lane::kCompute; }
  tessera::comm::StreamEventPtr record(tessera::comm::Lane lane) const;
  void wait(tessera::comm::Lane lane, const tessera::comm::StreamEventPtr& event);

 private:
  /// A moment, and the mesh dimension of the collective that was waited for last before it.
  struct Moment {
    double time = 0;
    std::string cause;
  };
  struct Event;
  class Transfer;

  Moment& lane(tessera::comm::Lane which) {
    return lanes_[has_lanes_ ? static_cast<std::size_t>(which) : 0];
  }
  void wait(tessera::comm::Lane which, const Moment& moment);
  void add_span(const std::string& row, const std::string& what, double begin, double end);
  double duration(const tessera::comm::FakeCollective& call) const;

  std::optional<Machine> machine_;
  bool has_lanes_;
  tessera::comm::Lane current_ = tessera::comm::Lane::kCompute;
  std::array<Moment, 4> lanes_{};
  std::map<std::string, double> networks_;  ///< until when each group's calls take
  double began_ = 0;
  StepTime step_;
};

/// FLOPs of an operator if it is a matrix product or attention (causal ones count half), else 0.
double product_flops(const tessera::kernels::FakeCall& call);

}  // namespace llama

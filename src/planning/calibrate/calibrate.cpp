// The rates of a machine from steps on it: lines through what its operators and collectives took.

#include "tessera/planning/calibrate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "schedule/schedule.h"
#include "tessera/comm/trace.h"
#include "tessera/kernels/operator_timer.h"

namespace tessera::planning {

using kernels::FakeCall;

namespace {

constexpr int kWarmUp = 2, kSteps = 5;

/// Seconds of work, as a line over its amount.
class Line {
 public:
  void add(double amount, double seconds) {
    count_ += 1;
    amount_ += amount;
    seconds_ += seconds;
    squares_ += amount * amount;
    products_ += amount * seconds;
  }
  double amount() const { return amount_; }
  double seconds() const { return seconds_; }
  /// What a unit of the amount takes, by least squares; all of the time where that is no line.
  double slope() const {
    const double spread = count_ * squares_ - amount_ * amount_;
    const double slope = spread > 0 ? (count_ * products_ - amount_ * seconds_) / spread : 0;
    return slope > 0 ? std::min(slope, seconds_ / amount_) : seconds_ / amount_;
  }
  /// What a call takes beside that.
  double intercept() const { return count_ > 0 ? (seconds_ - slope() * amount_) / count_ : 0; }

 private:
  double count_ = 0, amount_ = 0, seconds_ = 0, squares_ = 0, products_ = 0;
};

/// What a step has taken.
struct MeasuredStep {
  double seconds = std::numeric_limits<double>::infinity();
  Line products{}, attention{}, others{}, collectives{};

  void add(const FakeCall& call, double seconds_of_call) {
    const double flops = product_flops(call);
    Line& line = is_attention(call.name) ? attention : flops > 0 ? products : others;
    line.add(flops > 0 ? flops : bytes_of(call), seconds_of_call);
  }
  void add(const comm::CollectiveCall& call, int ranks) {
    collectives.add(ring_share(call.collective, ranks) * static_cast<double>(call.bytes),
                    std::chrono::duration<double>(call.exposed()).count());
  }
};

double seconds_of(const std::function<void()>& step) {
  const auto start = std::chrono::steady_clock::now();
  step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

MeasuredStep measure(const Run& run) {
  comm::World& world = *run.mesh.world();
  MeasuredStep measured;
  const comm::CallRecorder recorder(world.traffic());
  const kernels::OperatorTimer timer(
      [&](const FakeCall& call, double seconds) { measured.add(call, seconds); });
  measured.seconds = seconds_of(run.step);
  for (const comm::CollectiveCall& call : recorder.calls()) {
    measured.add(call, world.size());
  }
  return measured;
}

/// A line's amount by its seconds, in steps that are slower by the timing; 1e12 without any.
double rate(const Line& line, double scale) {
  return line.amount() > 0 ? line.amount() / (line.seconds() * scale) : 1e12;
}

Machine machine_of(const MeasuredStep& step, int ranks, double scale) {
  const double products = rate(step.products, scale);
  const bool sends = step.collectives.amount() > 0;
  const double link = sends ? 1 / (step.collectives.slope() * scale) : 1e12;
  const double latency = step.collectives.intercept() * scale;
  return {.name = fmt::format("this CPU, {} ranks", ranks),
          .memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                          static_cast<double>(sysconf(_SC_PAGESIZE)) / ranks,
          .reserved_bytes = 0,
          .flops_half = products,
          .flops_fp32 = products,
          .product_share = 1,
          .attention_share = rate(step.attention, scale) / products,
          .memory_bandwidth = 1 / (step.others.slope() * scale),
          .memory_share = 1,
          .operator_latency_s = 0,
          .ranks_per_node = ranks,
          .link_bandwidth = link,
          .network_bandwidth = link,
          .network_share = 1,
          .link_latency_s = latency,
          .network_latency_s = latency};
}

}  // namespace

Machine calibrate(const MakeRun& make, const comm::WorldPtr& world, PlanOptions options) {
  double fastest = std::numeric_limits<double>::infinity();
  MeasuredStep measured;
  {
    const Run run = make(world);
    for (int i = 0; i < kWarmUp; ++i) {
      run.step();
    }
    for (int i = 0; i < kSteps; ++i) {
      fastest = std::min(fastest, seconds_of(run.step));
      const MeasuredStep step = measure(run);
      measured = step.seconds < measured.seconds ? step : measured;
    }
  }
  options.machine = machine_of(measured, world->size(), fastest / measured.seconds);
  const auto planned = [&](double host_latency_s) {
    options.machine->host_latency_s = host_latency_s;
    return plan_rank(make, world->size(), world->rank(), options).time->total;
  };
  constexpr double kProbe = 1e-3;  // much, so that what runs beside collectives counts
  const double without = planned(0);
  options.machine->host_latency_s =
      std::max(0.0, (fastest - without) / (planned(kProbe) - without) * kProbe);
  return *options.machine;
}

}  // namespace tessera::planning

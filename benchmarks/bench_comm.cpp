// Measures collectives over shared memory and over Gloo on the loopback interface, in one run:
//   tessera-run --nproc 4 -- bench_comm
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <numeric>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace {

using tessera::ReduceOp;
using tessera::comm::Communicator;
using tessera::comm::CommunicatorPtr;
using Clock = std::chrono::steady_clock;

struct Collective {
  const char* name;
  /// Allocates the tensors of a collective and returns a function that runs the collective.
  /// `elements`: number of floats in the input or output tensor, whichever is larger.
  std::function<std::function<void()>(Communicator&, std::int64_t elements)> prepare;
};

const Collective kCollectives[] = {
    {"all_gather",
     [](Communicator& group, std::int64_t elements) -> std::function<void()> {
       const at::Tensor output = at::ones({elements});
       const at::Tensor input = at::ones({elements / group.size()});
       return [=, &group] { group.all_gather(output, input)->wait(); };
     }},
    {"reduce_scatter",
     [](Communicator& group, std::int64_t elements) -> std::function<void()> {
       const at::Tensor input = at::ones({elements});
       const at::Tensor output = at::ones({elements / group.size()});
       return [=, &group] { group.reduce_scatter(output, input, ReduceOp::kSum)->wait(); };
     }},
    {"all_reduce",
     [](Communicator& group, std::int64_t elements) -> std::function<void()> {
       const at::Tensor tensor = at::ones({elements});
       return [=, &group] { group.all_reduce(tensor, ReduceOp::kAvg)->wait(); };
     }},
};

/// Returns the median time of one call of `run`, in microseconds. A barrier precedes each call.
double median_time(Communicator& group, const std::function<void()>& call, int repeats) {
  std::vector<double> times;
  call();
  for (int i = 0; i < repeats; ++i) {
    group.barrier();
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::ranges::nth_element(times, times.begin() + repeats / 2);
  return times[static_cast<std::size_t>(repeats / 2)];
}

/// Returns the mean time of a call in microseconds, for back-to-back calls as in a training step.
double mean_time(Communicator& group, const std::function<void()>& call, int repeats) {
  group.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) {
    call();
  }
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / repeats;
}

CommunicatorPtr group_with(tessera::comm::World& world, const char* backend) {
  setenv("TESSERA_SHM", std::string(backend) == "shm" ? "1" : "0", 1);
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.group(ranks, backend);
}

void run() {
  constexpr std::int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
  constexpr std::int64_t kManyBytes = 256 << 20;
  const at::NoGradGuard no_grad;
  const auto world = tessera::comm::world_from_environment();
  const bool prints = world->rank() == 0;
  if (prints) {
    fmt::print("{} ranks, float32, time in us: median of one call | mean of calls in a row\n",
               world->size());
    fmt::print("{:<16}{:>10}{:>24}{:>24}\n", "collective", "bytes", "shm", "gloo");
  }
  for (const Collective& collective : kCollectives) {
    for (const std::int64_t bytes : kSizes) {
      const int repeats = static_cast<int>(std::clamp<std::int64_t>(kManyBytes / bytes, 10, 300));
      std::string line = fmt::format("{:<16}{:>10}", collective.name, bytes);
      for (const char* backend : {"shm", "gloo"}) {
        const CommunicatorPtr group = group_with(*world, backend);
        const auto call = collective.prepare(*group, bytes / std::int64_t{sizeof(float)});
        const double median = median_time(*group, call, repeats);
        line += fmt::format("{:>13.0f} |{:>9.0f}", median, mean_time(*group, call, repeats));
      }
      if (prints) {
        fmt::print("{}\n", line);
      }
    }
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const tessera::Error& error) {
    fmt::print(stderr, "bench_comm: {}\n", error.what());
    return 1;
  }
  return 0;
}

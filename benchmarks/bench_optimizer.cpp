// Optimizer steps and gradient clipping over 50 distributed parameters of one rank: what is left of
// a step beside its communication.
//
//   bench_optimizer [--benchmark_filter=REGEX]
//
// "flat" parameters and gradients are neighbours in memory, as FSDP lays out the shards of a unit.

#include <ATen/Parallel.h>
#include <ATen/ops/rand.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/sgd.h"

namespace {

using namespace tessera;
using Slots = std::vector<nn::SlotPtr>;

constexpr std::int64_t kParameters = 50;

at::Tensor distributed(const at::Tensor& local) {
  static const auto one = init_device_mesh(comm::fake_world(0, 1), {1}, {"dp"});
  return make_distributed(local, distribute_tensor(local, one, {Shard{0}}).spec(),
                          local.sizes().vec());
}

/// 50 matrices of `size` x `size` with gradients.
Slots slots_of(std::int64_t size, bool flat) {
  const std::int64_t numel = size * size;
  const at::Tensor values = at::rand({kParameters, size, size});
  const at::Tensor grads = at::rand({kParameters, size, size});
  Slots slots;
  for (std::int64_t i = 0; i < kParameters; ++i) {
    const auto local = [&](const at::Tensor& all) {
      return flat ? all.as_strided({size, size}, {size, 1}, i * numel) : all[i].clone();
    };
    const at::Tensor parameter = distributed(local(values)).requires_grad_();
    parameter.mutable_grad() = distributed(local(grads));
    slots.push_back(std::make_shared<nn::ParameterSlot>(parameter, /*initialized=*/true));
  }
  return slots;
}

using Step = std::function<void()>;
using MakeStep = std::function<Step(const Slots& slots)>;

template <class Optimizer, class Options>
MakeStep step_of(const Options& options) {
  return [options](const Slots& slots) -> Step {
    const auto optimizer = std::make_shared<Optimizer>(slots, options);
    return [optimizer] { optimizer->step(); };
  };
}

Step clip(const Slots& slots) {
  return [slots] { optim::clip_grad_norm_(slots, 1.0); };
}

void add(const std::string& name, const MakeStep& make, std::int64_t size, bool flat) {
  const std::string full =
      name + "/" + std::to_string(size) + "x" + std::to_string(size) + (flat ? "/flat" : "");
  benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) {
    const Step step = make(slots_of(size, flat));
    step();
    for (auto _ : state) {
      step();
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const std::int64_t size : {8, 256}) {
    for (const bool flat : {false, true}) {
      add("adamw", step_of<optim::AdamW>(optim::AdamWOptions{}), size, flat);
      add("sgd", step_of<optim::Sgd>(optim::SgdOptions{.momentum = 0.9}), size, flat);
      add("clip", clip, size, flat);
    }
  }
  add("muon", step_of<optim::Muon>(optim::MuonOptions{}), 64, false);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}

// Measures the overhead of a distributed tensor in an operator call, on one rank, compared with a
// plain tensor. The tensors are small, so that the kernels take little time.
//
//   bench_dispatch [--benchmark_filter=REGEX]
//
// The last line of output for an operator is the overhead in microseconds.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/functional.h"

namespace {

using tessera::DeviceMesh;
using Tensors = std::vector<at::Tensor>;
using Operator = std::function<void(const Tensors&)>;

DeviceMesh mesh() {
  static const auto one = tessera::init_device_mesh(tessera::comm::fake_world(0, 1), {1}, {"x"});
  return one;
}

at::Tensor distributed(const at::Tensor& tensor, const tessera::Placement& placement) {
  return tessera::distribute_tensor(tensor, mesh(), {placement}).tensor().detach();
}

struct Case {
  std::string name;
  Tensors inputs;
  Operator run;
  bool records = true;      ///< whether to also measure the call while autograd records
  std::size_t weights = 0;  ///< number of last inputs that are Replicate(); others are Shard(0)
};

Tensors inputs_of(const Case& c, bool distribute) {
  Tensors inputs;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    const bool weight = i + c.weights >= c.inputs.size();
    const auto placement = weight ? tessera::Placement(tessera::Replicate{}) : tessera::Shard{0};
    inputs.push_back(distribute ? distributed(c.inputs[i], placement) : c.inputs[i].clone());
  }
  return inputs;
}

void measure(benchmark::State& state, const Case& c, bool distribute, bool record) {
  const Tensors inputs = inputs_of(c, distribute);
  for (const at::Tensor& x : inputs) {
    if (record && x.is_floating_point()) {
      x.set_requires_grad(true);
    }
  }
  at::AutoGradMode grad_mode(record);
  c.run(inputs);
  for (auto _ : state) {
    c.run(inputs);
  }
}

std::vector<Case> cases() {
  const auto x = at::rand({8, 8});
  const auto index = at::arange(8, at::kLong);
  Tensors list, lists;
  for (int i = 0; i < 200; ++i) {
    list.push_back(at::rand({4}));
  }
  lists = list;
  lists.insert(lists.end(), list.begin(), list.end());
  using benchmark::DoNotOptimize;
  return {
      {"add", {x, x}, [](const Tensors& t) { DoNotOptimize(at::add(t[0], t[1])); }},
      {"mul_scalar", {x}, [](const Tensors& t) { DoNotOptimize(at::mul(t[0], 2.0)); }},
      {"mul_", {x, x}, [](const Tensors& t) { t[0].mul_(t[1]); }, false},
      {"view", {x}, [](const Tensors& t) { DoNotOptimize(t[0].view({64})); }},
      {"t", {x}, [](const Tensors& t) { DoNotOptimize(t[0].t()); }},
      {"mm", {x, x}, [](const Tensors& t) { DoNotOptimize(at::mm(t[0], t[1])); }, true, 1},
      {"addmm",
       {x, x, x},
       [](const Tensors& t) { DoNotOptimize(at::addmm(t[0], t[1], t[2])); },
       true,
       1},
      {"sum", {x}, [](const Tensors& t) { DoNotOptimize(at::sum(t[0], 1)); }},
      {"softmax", {x}, [](const Tensors& t) { DoNotOptimize(at::softmax(t[0], -1)); }},
      {"cat", {x, x}, [](const Tensors& t) { DoNotOptimize(at::cat({t[0], t[1]}, 1)); }},
      {"embedding",
       {index, x},
       [](const Tensors& t) { DoNotOptimize(at::embedding(t[1], t[0])); },
       true,
       1},
      {"sdpa",
       {at::rand({2, 2, 4, 8})},
       [](const Tensors& t) { DoNotOptimize(at::scaled_dot_product_attention(t[0], t[0], t[0])); }},
      {"silu_mul",
       {x, x},
       [](const Tensors& t) { DoNotOptimize(tessera::nn::silu_mul(t[0], t[1])); }},
      {"rms_norm",
       {x, at::rand({8})},
       [](const Tensors& t) { DoNotOptimize(tessera::nn::rms_norm(t[0], t[1], 1e-5)); },
       true,
       1},
      {"foreach_add_200", lists,
       [](const Tensors& t) {
         at::_foreach_add_(at::TensorList(t).slice(0, 200), at::TensorList(t).slice(200));
       },
       false},
      {"detach", {x}, [](const Tensors& t) { DoNotOptimize(t[0].detach()); }, false},
  };
}

/// Measures the first call of an operator, in which the operator's sharding is computed.
void measure_first(benchmark::State& state, const Case& c) {
  const Tensors inputs = inputs_of(c, true);
  const at::NoGradGuard no_grad;
  for (auto _ : state) {
    state.PauseTiming();
    tessera::clear_dispatch_cache();
    state.ResumeTiming();
    c.run(inputs);
  }
}

constexpr int kMisses = 1000;

/// Measures mm without the dispatch cache: every call has inputs of new sizes, so the layouts are
/// computed again. The argument is the number of mesh dimensions.
void measure_misses(benchmark::State& state) {
  const auto ndim = static_cast<std::size_t>(state.range(0));
  const auto mesh = tessera::init_device_mesh(tessera::comm::fake_world(0, 1 << ndim),
                                              std::vector<std::int64_t>(ndim, 2), {});
  tessera::Placements rows(ndim, tessera::Replicate{});
  rows[0] = tessera::Shard{0};
  Tensors inputs;
  for (int i = 0; i < kMisses; ++i) {
    inputs.push_back(tessera::distribute_tensor(at::ones({8 + 2 * i, 4}), mesh, rows));
  }
  const at::Tensor weight = tessera::distribute_tensor(
      at::ones({4, 4}), mesh, tessera::Placements(ndim, tessera::Replicate{}));
  std::size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(at::mm(inputs[next++], weight));
  }
}

void register_cases() {
  benchmark::RegisterBenchmark("mm/miss", &measure_misses)->DenseRange(1, 3)->Iterations(kMisses);
  for (const auto& c : cases()) {
    benchmark::RegisterBenchmark((c.name + "/first").c_str(),
                                 [c](auto& state) { measure_first(state, c); });
    for (const bool record : {false, true}) {
      if (record && !c.records) {
        continue;
      }
      for (const bool distribute : {false, true}) {
        const auto name =
            c.name + (record ? "/autograd" : "") + (distribute ? "/distributed" : "/plain");
        benchmark::RegisterBenchmark(name.c_str(), [c, distribute, record](auto& state) {
          measure(state, c, distribute, record);
        });
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  register_cases();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}

// The fused kernels beside the same in ATen operators, on one thread, in fp32.
//
//   bench_kernels --benchmark_enable_random_interleaving=true [--benchmark_filter=REGEX]
//
// The median of repetitions that take turns is what to read.

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <string>

#include "tessera/kernels/detail/fused.h"

namespace {

using namespace tessera;
using Call = std::function<at::Tensor()>;

void add(const std::string& name, const Call& call) {
  const auto run = [call](benchmark::State& state) {
    for (auto _ : state) {
      benchmark::DoNotOptimize(call());
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->Unit(benchmark::kMicrosecond)
      ->Repetitions(9)
      ->ReportAggregatesOnly();
}

void add_pair(const std::string& name, const Call& ours, const Call& aten) {
  add(name + "/tessera", ours);
  add(name + "/aten", aten);
}

void add_rms_norm() {
  const at::Tensor x = at::rand({1024, 256}), weight = at::rand({256});
  add_pair(
      "rms_norm 1024x256", [=] { return kernels::rms_norm(x, weight, 1e-5).out; },
      [=] { return at::rms_norm(x, {256}, weight, 1e-5); });
}

void add_rotary_embedding() {
  const at::Tensor x = at::rand({4, 256, 4, 64}), cos = at::rand({256, 64}),
                   sin = at::rand({256, 64});
  add_pair(
      "rotary_embedding 4x256x4x64",
      [=] { return kernels::rotary_embedding(x, cos, sin, /*transposed=*/false); },
      [=] {
        const at::Tensor turned = at::cat({x.narrow(-1, 32, 32).neg(), x.narrow(-1, 0, 32)}, -1);
        return x.mul(cos.unsqueeze(1)).add(turned.mul(sin.unsqueeze(1)));
      });
}

void add_silu_mul() {
  const at::Tensor gate = at::rand({1024, 688}), up = at::rand({1024, 688});
  add_pair(
      "silu_mul 1024x688", [=] { return kernels::silu_mul(gate, up); },
      [=] { return at::silu(gate).mul(up); });
}

void add_embedding() {
  const at::Tensor table = at::rand({4096, 256}), grad = at::rand({1024, 256}),
                   indices = at::randint(4096, {1024}, at::kLong);
  add_pair(
      "embedding of 1024, 4096x256",
      [=] { return kernels::embedding_rows(table, indices, 0, 4096); },
      [=] { return at::embedding(table, indices); });
  add_pair(
      "embedding backward of 1024, 4096x256",
      [=] { return kernels::embedding_rows_backward(grad, indices, 0, 4096); },
      [=] { return at::embedding_dense_backward(grad, indices, 4096, -1, false); });
}

/// What nn::FusedLinear gains: the query, key and value of few tokens, as a rank of tensor
/// parallelism has them.
void add_fused_linear() {
  const at::Tensor x = at::rand({64, 1024}), weight = at::rand({512, 1024});
  add_pair(
      "query, key and value of 64x1024", [=] { return at::linear(x, weight); },
      [=] {
        at::linear(x, weight.narrow(0, 0, 256));
        at::linear(x, weight.narrow(0, 256, 128));
        return at::linear(x, weight.narrow(0, 384, 128));
      });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  add_rms_norm();
  add_rotary_embedding();
  add_silu_mul();
  add_embedding();
  add_fused_linear();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}

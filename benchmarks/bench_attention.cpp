// Attention of packed documents and within windows beside the same with a mask, forward and
// backward: on one thread of the CPU in fp32, 2 sequences of 2048 tokens, 8 heads of 32 features.
//
//   bench_attention --benchmark_enable_random_interleaving=true [--benchmark_filter=REGEX]
//
// The median of repetitions that take turns is what to read. The mask is made outside of the time.

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <string>

#include "tessera/nn/causal_attention.h"

namespace {

using namespace tessera;
using Attend =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

constexpr std::int64_t kBatch = 2, kTokens = 2048, kHeads = 8, kWidth = 32;

void add(const std::string& name, const Attend& attend) {
  const auto run = [attend](benchmark::State& state) {
    const auto leaf = [] {
      return at::rand({kBatch, kTokens, kHeads, kWidth}).transpose(1, 2).requires_grad_();
    };
    const at::Tensor q = leaf(), k = leaf(), v = leaf();
    for (auto _ : state) {
      attend(q, k, v).sum().backward();
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->Unit(benchmark::kMillisecond)
      ->Repetitions(5)
      ->ReportAggregatesOnly();
}

/// Documents of `length` tokens, 0 for whole sequences, in a window of `window`, 0 for none.
void add_pair(std::int64_t length, std::int64_t window) {
  const std::int64_t longest = length > 0 ? length : kTokens;
  const auto documents = std::make_shared<const nn::Documents>(
      at::arange(kTokens, at::kLong).remainder(longest).expand({kBatch, -1}), at::kCPU);
  const std::string of = fmt::format("documents of {}, window of {}", longest, window);
  add(of + "/without a mask", [=](auto& q, auto& k, auto& v) {
    return nn::causal_attention(q, k, v, {.window = window, .documents = documents});
  });
  add(of + "/with a mask", [mask = documents->mask(window)](
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return nn::attention(q, k, v, /*causal=*/false, mask);
  });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const std::int64_t length : {8, 32, 128, 512}) {
    add_pair(length, 0);
  }
  add_pair(0, 64);
  add_pair(0, 256);
  add_pair(0, 1024);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}

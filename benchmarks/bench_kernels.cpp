// Compares the fused kernels with the same computation in ATen operators: on one CPU thread in
// fp32, or on a GPU in bf16 with the sizes of an 8B transformer block.
//
//   bench_kernels --benchmark_enable_random_interleaving=true [--benchmark_filter=REGEX]
//   bench_kernels cuda [TOKENS]      a multiple of 4 (16384)
//
// Use the median of the repetitions. bytes_per_second counts only bytes that must be read and
// written.

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <benchmark/benchmark.h>
#include <c10/core/Event.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/comm/detail/streams.h"
#include "tessera/kernels/detail/fused.h"

namespace {

using namespace tessera;
using Call = std::function<at::Tensor()>;

/// The sizes of a transformer block. `tokens` is the number of tokens of all `batch` sequences.
struct Sizes {
  at::TensorOptions options;
  std::int64_t tokens, dim, hidden, head_dim, vocabulary, batch = 4;

  at::Tensor rand(at::IntArrayRef sizes) const { return at::rand(sizes, options); }
};

/// Measures a call with two GPU events. kCalls calls run between the events, which hides the launch
/// latency.
void time_on_gpu(benchmark::State& state, const Call& call) {
  constexpr int kCalls = 20;
  const auto device = c10::Device(c10::kCUDA, 0);
  const c10::Stream stream = at::accelerator::getCurrentStream(device.index());
  c10::Event begin(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT),
      end(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  call();
  for (auto _ : state) {
    begin.record(stream);
    for (int i = 0; i < kCalls; ++i) {
      call();
    }
    end.record(stream);
    end.synchronize();
    // With the tests' stub of CUDA, a call takes no time, but Google Benchmark rejects a time of 0.
    state.SetIterationTime(std::max(begin.elapsedTime(end) / 1e3, 1e-6) / kCalls);
  }
}

void time_on_cpu(benchmark::State& state, const Call& call) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(call());
  }
}

void add(const std::string& name, const Call& call, std::int64_t bytes, bool on_gpu) {
  const auto run = [=](benchmark::State& state) {
    (on_gpu ? time_on_gpu : time_on_cpu)(state, call);
    state.SetBytesProcessed(state.iterations() * bytes);
  };
  auto* added = benchmark::RegisterBenchmark(name.c_str(), run)
                    ->Unit(benchmark::kMicrosecond)
                    ->Repetitions(9)
                    ->ReportAggregatesOnly();
  if (on_gpu) {
    added->UseManualTime();
  }
}

void add_pair(const std::string& name, const std::vector<at::Tensor>& inputs, const Call& ours,
              const Call& aten) {
  std::int64_t bytes = static_cast<std::int64_t>(ours().nbytes());
  for (const at::Tensor& input : inputs) {
    bytes += static_cast<std::int64_t>(input.nbytes());
  }
  const bool on_gpu = inputs.front().is_cuda();
  add(name + "/tessera", ours, bytes, on_gpu);
  add(name + "/aten", aten, bytes, on_gpu);
}

void add_rms_norm(const Sizes& s) {
  const at::Tensor x = s.rand({s.tokens, s.dim}), weight = s.rand({s.dim});
  add_pair(
      fmt::format("rms_norm {}x{}", s.tokens, s.dim), {x, weight},
      [=] { return kernels::rms_norm(x, weight, 1e-5).out; },
      [=] { return at::rms_norm(x, {weight.size(0)}, weight, 1e-5); });
}

/// Adds benchmarks of RMSNorm(x + y), forward and backward: the fused kernel, two ATen operators,
/// and an addition followed by Tessera's RMSNorm.
void add_norm_of_sum(const Sizes& s) {
  const at::Tensor x = s.rand({s.tokens, s.dim}), other = s.rand({s.tokens, s.dim}),
                   weight = s.rand({s.dim}), rstd = kernels::rms_norm(x, weight, 1e-5).rstd;
  const auto bytes = static_cast<std::int64_t>(4 * x.nbytes());
  const auto row = [&](const std::string& name, const Call& call) {
    add(fmt::format("{} {}x{}", name, s.tokens, s.dim), call, bytes, x.is_cuda());
  };
  row("add_rms_norm/tessera", [=] { return kernels::add_rms_norm(x, other, weight, 1e-5).out; });
  row("add_rms_norm/norm of sum",
      [=] { return kernels::rms_norm(at::add(x, other), weight, 1e-5).out; });
  row("add_rms_norm/aten",
      [=] { return at::rms_norm(at::add(x, other), {weight.size(0)}, weight, 1e-5); });
  row("add_rms_norm backward/tessera",
      [=] { return kernels::rms_norm_backward(x, x, weight, rstd, other).first; });
  row("add_rms_norm backward/norm and sum",
      [=] { return at::add(kernels::rms_norm_backward(x, x, weight, rstd).first, other); });
}

void add_rotary_embedding(const Sizes& s) {
  const std::int64_t positions = s.tokens / s.batch, heads = s.dim / s.head_dim;
  const at::Tensor x = s.rand({s.batch, positions, heads, s.head_dim}),
                   cos = s.rand({positions, s.head_dim}), sin = s.rand({positions, s.head_dim});
  add_pair(
      fmt::format("rotary_embedding {}x{}x{}x{}", s.batch, positions, heads, s.head_dim),
      {x, cos, sin}, [=] { return kernels::rotary_embedding(x, cos, sin, /*transposed=*/false); },
      [=, half = s.head_dim / 2] {
        const at::Tensor turned =
            at::cat({x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)}, -1);
        return x.mul(cos.unsqueeze(1)).add(turned.mul(sin.unsqueeze(1)));
      });
}

void add_silu_mul(const Sizes& s) {
  const at::Tensor gate = s.rand({s.tokens, s.hidden}), up = s.rand({s.tokens, s.hidden});
  add_pair(
      fmt::format("silu_mul {}x{}", s.tokens, s.hidden), {gate, up},
      [=] { return kernels::silu_mul(gate, up); }, [=] { return at::silu(gate).mul(up); });
}

void add_embedding(const Sizes& s) {
  const std::int64_t rows = s.vocabulary;
  const at::Tensor table = s.rand({rows, s.dim}), grad = s.rand({s.tokens, s.dim}),
                   indices = at::randint(rows, {s.tokens}, s.options.dtype(at::kLong));
  const std::string of = fmt::format("of {}, {}x{}", s.tokens, rows, s.dim);
  // A lookup reads only some rows of `table`. `grad` has the size of these rows, so the number of
  // bytes is computed from `grad`.
  add_pair(
      "embedding " + of, {grad, indices},
      [=] { return kernels::embedding_rows(table, indices, 0, rows); },
      [=] { return at::embedding(table, indices); });
  add_pair(
      "embedding backward " + of, {grad, indices},
      [=] { return kernels::embedding_rows_backward(grad, indices, 0, rows); },
      [=] { return at::embedding_dense_backward(grad, indices, rows, -1, false); });
}

/// Compares one matrix product for query, key and value (nn::FusedLinear) with three products. The
/// weight has the sizes of the shard of one tensor-parallel rank.
void add_fused_linear(const Sizes& s) {
  const at::Tensor x = s.rand({64, 1024}), weight = s.rand({512, 1024});
  add_pair(
      "query, key and value of 64x1024", {x, weight}, [=] { return at::linear(x, weight); },
      [=] {
        at::linear(x, weight.narrow(0, 0, 256));
        at::linear(x, weight.narrow(0, 256, 128));
        return at::linear(x, weight.narrow(0, 384, 128));
      });
}

void add_all(const Sizes& sizes) {
  for (const auto add : {add_rms_norm, add_norm_of_sum, add_rotary_embedding, add_silu_mul,
                         add_embedding, add_fused_linear}) {
    add(sizes);
  }
}

Sizes on_gpu(std::int64_t tokens) {
  return {.options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16),
          .tokens = tokens,
          .dim = 4096,
          .hidden = 14336,
          .head_dim = 128,
          .vocabulary = 32000};
}

Sizes on_cpu() {
  return {
      .options = {}, .tokens = 1024, .dim = 256, .hidden = 688, .head_dim = 64, .vocabulary = 4096};
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const bool cuda = argc > 1 && argv[1] == std::string("cuda");
  const std::int64_t tokens = argc > 2 ? std::atoll(argv[2]) : 16384;
  if (argc > (cuda ? 3 : 1) || tokens < 4 || tokens % 4 != 0) {
    std::cerr << "usage: bench_kernels [cuda [TOKENS]], TOKENS a multiple of 4" << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  // make_streams() also loads libtessera_cuda.so, the library with the CUDA kernels.
  const comm::StreamsPtr streams = cuda ? comm::make_streams(c10::Device(c10::kCUDA, 0)) : nullptr;
  add_all(cuda ? on_gpu(tokens) : on_cpu());
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  // The benchmarks' tensors are freed before libtessera_cuda.so is unloaded at the program's end.
  benchmark::ClearRegisteredBenchmarks();
}
